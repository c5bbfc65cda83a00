"""Trajectories a second: Clew's rollout against loops around Hugging Face's ``generate``.

    python benchmarks/rollout_speed.py [--model FOLDER] [--repeats 5] [--threads 2]

Compared, in one process, in turn, after one round that is not counted:

- clew: all episodes in one batch on a key/value cache kept across turns, each distinct frame encoded once;
- one at a time: ``model.generate`` on the full conversation each turn, one episode after the other;
- batched: the same, over all living episodes at once (left padding, attention mask).

Held equal: weights (no adapter), mazes, environment and episode loop, token ids of the prompts, turn and
token caps, temperature, the full vocabulary without vision tokens, threads, float32, ``use_cache=True``,
frames cut into patches by the same code (each once an episode). The loops call the stock transformers model
as loaded, and need not return the log-probabilities that Clew's engine returns. Each repeat plays the same
mazes with other draws.

Before timing it is checked that the loops' inputs equal what the folder's Hugging Face processor makes of the
whole conversation, and that the three give the same greedy episodes. ``--single-samples`` lets the slow loop
play fewer than 8 trajectories a maze (a rate, so the comparison holds).
"""

from __future__ import annotations

import copy

import common
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from clew.agent.ledger import Trajectory
from clew.envs.base import Task
from clew.policy.vision import FeatureCache
from clew.rollout.engine import Completion, Engine, LockstepEngine, Sampling
from clew.rollout.episodes import play
from clew.rollout.transformers_engine import TransformersEngine


class GenerateEngine(LockstepEngine):
    """Answers with ``model.generate`` on whole conversations: what a plain agent loop does each turn."""

    version = "base"

    def __init__(self, bench: common.Bench) -> None:
        super().__init__()
        self.model = AutoModelForImageTextToText.from_pretrained(bench.path, dtype=torch.float32).eval()
        self.template, self.patcher = bench.vlm.template, bench.vlm.patcher
        self.pad_id = bench.vlm.tokenizer.pad_token_id
        self.forbidden = bench.vlm.forbidden_ids.tolist()
        self._pixels: dict[int, list[Tensor]] = {}

    def inputs(self, trajectories: list[Trajectory]) -> dict[str, Tensor]:
        """What the Hugging Face processor gives for these conversations, padded on the left."""
        rows = [torch.tensor(t.token_ids) for t in trajectories]
        ids_BT = torch.nn.utils.rnn.pad_sequence(rows, True, self.pad_id, padding_side="left")
        real_BT = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True, 0, padding_side="left")
        pixels: list[Tensor] = []
        for t in trajectories:
            known = self._pixels.setdefault(id(t), [])
            known += [self.patcher(turn.frame).pixels for turn in t.turns[len(known) :]]
            pixels += known
        return {
            "input_ids": ids_BT,
            "attention_mask": real_BT,
            "pixel_values": torch.cat(pixels),
            "image_grid_thw": torch.tensor([grid for t in trajectories for grid in t.grids]),
            "mm_token_type_ids": (ids_BT == self.template.image_token_id).long(),
        }

    def sample(self, trajectories: list[Trajectory], sampling: Sampling, seeds: list[int]) -> list[Completion]:
        """Answers each trajectory once (the draws come from torch's generator, not from ``seeds``)."""
        inputs = self.inputs(trajectories)
        drawing = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
        out_BT = self.model.generate(
            **inputs,
            **(drawing if sampling.temperature else {"do_sample": False}),
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self.template.end_of_turn_id,
            pad_token_id=self.pad_id,
            suppress_tokens=self.forbidden,
            use_cache=True,
        )
        return [self._completion(row) for row in out_BT[:, inputs["input_ids"].shape[1] :].tolist()]

    def _completion(self, ids: list[int]) -> Completion:
        ended = self.template.end_of_turn_id in ids
        ids = ids[: ids.index(self.template.end_of_turn_id) + 1] if ended else ids
        return Completion(ids, [0.0] * len(ids), ended)

    def release(self) -> None:
        self._pixels.clear()


class OracleEngine(LockstepEngine):
    """Answers with the oracle's moves: conversations whose text is known beforehand."""

    version = "oracle"

    def __init__(self, bench: common.Bench) -> None:
        super().__init__()
        self.tokenizer, self.env = bench.vlm.tokenizer, bench.make_env()
        self.end_of_turn = bench.vlm.template.end_of_turn_id

    def sample(self, trajectories: list[Trajectory], sampling: Sampling, seeds: list[int]) -> list[Completion]:
        """Answers each trajectory once; its moves so far are played again to find where it stands."""
        return [self._answer(t) for t in trajectories]

    def _answer(self, trajectory: Trajectory) -> Completion:
        self.env.reset(trajectory.task.seed)
        for turn in trajectory.turns[:-1]:
            self.env.step(turn.answer)
        ids = [*self.tokenizer(self.env.oracle_action())["input_ids"], self.end_of_turn]
        return Completion(ids, [0.0] * len(ids), True)

    def release(self) -> None:
        """Nothing is kept."""


def check_inputs(bench: common.Bench, loop: GenerateEngine, attempts: list[tuple[Task, int]]) -> None:
    """The loops' inputs are those of the Hugging Face processor, to the last bit.

    Raises:
        AssertionError: they differ.
    """
    played = play(OracleEngine(bench), bench.player, bench.make_env, attempts, bench.sampling, bench.limits, (0,))
    processor = common.hugging_face_processor(bench.path)
    conversations, images = [], []
    for trajectory in played:
        messages = []
        for index, turn in enumerate(trajectory.turns):
            text = turn.text if index else bench.make_env().prompt
            messages.append({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]})
            messages.append({"role": "assistant", "content": turn.answer})
        conversations.append(processor.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False))
        images.append([Image.fromarray(turn.frame) for turn in trajectory.turns])
    theirs = processor(text=conversations, images=images, padding=True, padding_side="left", return_tensors="pt")
    asked = copy.deepcopy(played)
    for trajectory in asked:  # as they stood before the last answer
        del trajectory.token_ids[trajectory.turns[-1].start :]
    ours = loop.inputs(asked)
    loop.release()
    assert set(theirs) == set(ours), (set(theirs), set(ours))
    for name, value in theirs.items():
        assert torch.equal(value, ours[name]), f"{name} differs from the Hugging Face processor's"
    print(
        f"inputs of {len(played)} conversations of {len(images[0])} to {len(images[-1])} turns: "
        "equal to the processor's"
    )


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--single-samples", type=int, default=8, help="trajectories a maze, one at a time")
    options = parser.parse_args()
    bench = common.prepare(options.model, options.threads)
    attempts = bench.attempts(options.mazes)
    fewer = [(task, k) for task, k in attempts if k < options.single_samples]
    clew = TransformersEngine(bench.vlm, FeatureCache(bench.vlm.model.model.visual, bench.vlm.patcher))
    loop = GenerateEngine(bench)

    def rollout(engine: Engine, todo: list[tuple[Task, int]], sampling: Sampling, index: int) -> list[Trajectory]:
        engine.release()
        torch.manual_seed(index)
        return play(engine, bench.player, bench.make_env, todo, sampling, bench.limits, ("speed", index))

    def one_by_one(todo: list[tuple[Task, int]], sampling: Sampling, index: int) -> list[Trajectory]:
        return [rollout(loop, [attempt], sampling, 1000 * index + n)[0] for n, attempt in enumerate(todo)]

    by_length = sorted(
        (a for a in attempts if a[1] == 0), key=lambda a: bench.make_env().reset(a[0].seed)[1]["path_length"]
    )
    check_inputs(bench, loop, by_length)
    greedy = Sampling(0.0, bench.sampling.max_new_tokens)
    episodes = [
        rollout(clew, by_length, greedy, 0),
        rollout(loop, by_length, greedy, 0),
        one_by_one(by_length, greedy, 0),
    ]
    same = [len({tuple(t.token_ids) for t in three}) == 1 for three in zip(*episodes, strict=True)]
    print(f"greedy episodes: {sum(same)} of {len(same)} the same token for token in all three")

    watch = common.Stopwatch()
    contestants = {
        "clew": (lambda index: rollout(clew, attempts, bench.sampling, index), attempts),
        "batched generate": (lambda index: rollout(loop, attempts, bench.sampling, index), attempts),
        "generate, one at a time": (lambda index: one_by_one(fewer, bench.sampling, index), fewer),
    }
    work = {name: common.Work() for name in contestants}
    for index in range(options.repeats + 1):
        for name, (run, _) in contestants.items():
            with watch.time(name if index else "warm-up"):
                trajectories = run(index)
            if index:
                work[name].add(trajectories)

    group = bench.recipe.algorithm.group_size
    print(f"\n{options.mazes} mazes x {group} trajectories, {options.repeats} repeats, medians:")
    rate: dict[str, float] = {}
    for name, (_, todo) in contestants.items():
        rate[name] = len(todo) / watch.median(name)
        print(f"{name:24} {rate[name]:8.2f} trajectories/s   ({watch.spread(name)} s for {len(todo)})")
        print(f"{'':24} {work[name]}")
    for name, target in (("batched generate", 3), ("generate, one at a time", 10)):
        print(f"clew / {name:24} {rate['clew'] / rate[name]:6.2f}x  (target {target}x)")


if __name__ == "__main__":
    main()
