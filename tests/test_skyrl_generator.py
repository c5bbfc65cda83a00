"""SkyRL's own generator plays Clew's mazes, and what it records is compared with Clew's record of the same play.

The real `SkyRLVLMGymGenerator`, data set reader and metrics of SkyRL 0.4.0; only vLLM is replaced (`skyrl_client`).
Each test of a difference is named in docs/skyrl.md.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from skyrl_client import SEED_PARTS, StandInClient, generate, install_image_codec, sampler

from clew.agent.ledger import StopReason, Trajectory
from clew.envs import MazeEnv
from clew.envs.base import Observation
from clew.envs.maze_env import parse_action
from clew.errors import UserError
from clew.policy.model import VisionLanguageModel, load_model
from clew.policy.paths import resolve_model_path
from clew.recipe import ModelTable, Recipe, load_recipe
from clew.rollout.engine import Completion, Sampling
from clew.rollout.episodes import Limits, Player, play
from clew.rollout.transformers_engine import TransformersEngine
from clew.runtime.skyrl.tasks import TaskFiles, heldout_rows, training_rows, write_tasks

pytestmark = [
    pytest.mark.skyrl,
    pytest.mark.skipif(
        importlib.util.find_spec("skyrl_gym") is None, reason="SkyRL is not installed here: run `make test-skyrl`"
    ),
]
SMALL = ("training.steps=2", "training.prompts_per_step=4", "evaluation.size=8", "evaluation.confirm_size=8")


@pytest.fixture(autouse=True)
def image_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    install_image_codec(monkeypatch)


@pytest.fixture(scope="module")
def vlm() -> VisionLanguageModel:
    """The model that is shipped: it solves a part of the mazes."""
    return load_model(resolve_model_path(ModelTable(path="package:warm-start")))


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("laptop", SMALL)


@pytest.fixture(scope="module")
def rows(recipe: Recipe) -> list[dict[str, Any]]:
    return training_rows(recipe)


def make_maze(recipe: Recipe) -> MazeEnv:
    table = recipe.environment
    return MazeEnv(table.size, table.min_path, table.max_path, table.max_turns)


def engine(vlm: VisionLanguageModel) -> TransformersEngine:
    return TransformersEngine(vlm, tiny.feature_cache(vlm))


def client(vlm: VisionLanguageModel, rows: list[dict[str, Any]]) -> StandInClient:
    return StandInClient(vlm, sampler(engine(vlm)), rows)


@dataclass(frozen=True)
class Record:
    """SkyRL's record of one trajectory, prompt and response put together as Clew's ledger has them."""

    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    rewards: list[float]
    stop: str
    success: bool
    pixels: torch.Tensor
    grids: list[tuple[int, ...]]


def records(output: dict[str, Any]) -> list[Record]:
    found = []
    for i, prompt in enumerate(output["prompt_token_ids"]):
        blank = [0] * len(prompt)
        found.append(
            Record(
                ids=prompt + output["response_ids"][i],
                sampled=[bool(m) for m in blank + output["loss_masks"][i]],
                logprobs=[0.0] * len(prompt) + output["rollout_logprobs"][i],
                rewards=[0.0] * len(prompt) + output["rewards"][i],
                stop=output["stop_reasons"][i],
                success=output["env_metrics"][i]["success"],
                pixels=output["pixel_values"][i],
                grids=[tuple(grid) for grid in output["image_grid_thw"][i].tolist()],
            )
        )
    return found


def clews(
    vlm: VisionLanguageModel, recipe: Recipe, theirs: StandInClient, samples: int, max_new_tokens: int, max_tokens: int
) -> list[Trajectory]:
    """Clew's own play of the same rows with the same seeds, all of them in one batch."""
    attempts = [(theirs.task(row), sample) for row in range(len(theirs.rows)) for sample in range(samples)]
    player = Player(vlm.template, vlm.patcher)
    sampling = Sampling(1.0, max_new_tokens)
    return play(engine(vlm), player, lambda: make_maze(recipe), attempts, sampling, Limits(max_tokens), SEED_PARTS)


# ------------------------------------------------------------------------------- the same play, recorded twice


def test_the_trajectories_are_clews_token_by_token(
    vlm: VisionLanguageModel, recipe: Recipe, rows: list[dict[str, Any]]
) -> None:
    """Ids, loss masks, log-probabilities, images, rewards and success of 4 mazes x 4 samples."""
    theirs = client(vlm, rows[:4])
    output = generate(theirs, 4)
    ours = clews(vlm, recipe, theirs, 4, 8, 100_000)
    assert {t.stop_reason for t in ours} == {StopReason.SUCCESS, StopReason.TURN_CAP}
    for a, b in zip(ours, records(output), strict=True):
        assert a.token_ids == b.ids
        assert a.sampled == b.sampled
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4)
        assert a.grids == b.grids
        assert torch.equal(torch.cat([vlm.patcher(turn.frame).pixels for turn in a.turns]), b.pixels)
        # The last frame is shown to nobody, here and there.
        assert len(b.grids) == len(a.turns)
        # The reward lies on each answer's last token: its end of turn.
        assert {turn.end - 1: turn.reward for turn in a.turns if turn.reward} == {
            i: reward for i, reward in enumerate(b.rewards) if reward
        }
        assert (sum(b.rewards), b.success, b.stop) == (a.reward, a.success, "stop")
    metrics = output["rollout_metrics"]
    solved = sum(t.success for t in ours)
    print(f"{solved} of {len(ours)} solved, {sum(len(t.token_ids) for t in ours):,} tokens the same")
    assert 0 < metrics["environment/solved"] == solved < metrics["environment/episodes"] == len(ours)
    assert metrics["environment/solve_rate_mean"] == solved / len(ours)


def test_both_stop_where_tokens_run_out(vlm: VisionLanguageModel, recipe: Recipe, rows: list[dict[str, Any]]) -> None:
    """SkyRL bounds what an answer is conditioned on, Clew that and the answer: the same episodes end, at one id."""
    theirs = client(vlm, rows[:3])
    output = generate(theirs, 2, max_input_length=250)
    ours = clews(vlm, recipe, theirs, 2, 8, 250 + 8)
    assert StopReason.TRAJECTORY_TOKENS in {t.stop_reason for t in ours}
    for a, b in zip(ours, records(output), strict=True):
        assert a.token_ids == b.ids and a.sampled == b.sampled
        assert (b.stop == "length") == (a.stop_reason == StopReason.TRAJECTORY_TOKENS)
        assert sum(b.rewards) == a.reward


# ------------------------------------------------------------------------------------------- the differences


def test_an_answer_that_is_cut_is_played_on(
    vlm: VisionLanguageModel, recipe: Recipe, rows: list[dict[str, Any]]
) -> None:
    """Clew ends the episode; SkyRL hands the text to the environment and goes on behind the template's end of turn."""
    theirs = client(vlm, rows[:1])
    (b,) = records(generate(theirs, 1, max_new_tokens=2))
    (a,) = clews(vlm, recipe, theirs, 1, 2, 100_000)
    assert a.stop_reason == StopReason.TURN_TOKENS and b.stop == "length"
    assert b.ids[: len(a.token_ids)] == a.token_ids and b.sampled[: len(a.token_ids)] == a.sampled
    env = make_maze(recipe)
    env.reset(rows[0]["seed"])
    text = env.step(a.turns[0].answer)[0].text
    count = int(np.prod(a.grids[0])) // vlm.merge_size**2
    following = vlm.template.continuation(text, count, ended=False)
    assert following[0] == vlm.template.end_of_turn_id
    start = len(a.token_ids)
    assert b.ids[start : start + len(following)] == following
    assert not any(b.sampled[start : start + len(following)])
    assert len(b.grids) == recipe.environment.max_turns


def test_an_answer_in_unusual_tokens_is_written_anew(
    vlm: VisionLanguageModel, recipe: Recipe, rows: list[dict[str, Any]]
) -> None:
    """SkyRL renders the whole conversation again each turn: what was sampled is encoded anew, and offsets slip."""
    encode = vlm.tokenizer
    usual = encode("<action>left</action>", add_special_tokens=False)["input_ids"]
    spelt = [usual[0], *encode.convert_tokens_to_ids(list("left")), usual[-1]]
    assert encode.decode(spelt) == encode.decode(usual) and len(spelt) > len(usual)
    answer = [*spelt, vlm.template.end_of_turn_id]

    def spell(trajectory: Trajectory, sampling: Sampling, seed: int) -> Completion:
        return Completion(answer, [-1.0] * len(answer), True)

    theirs = StandInClient(vlm, spell, rows[:1])
    (b,) = records(generate(theirs, 1))
    first, second = theirs.prompts["0_0"][:2]
    assert b.ids[: len(first) + len(answer)] == first + answer
    # The engine's next answer was conditioned on other ids than the trainer will score ...
    assert second[: len(first) + len(usual)] == first + usual
    assert b.ids[: len(second)] != second
    # ... and the observation has lost as many tokens at its beginning as the answer had more than the usual ones.
    lost = len(spelt) - len(usual)
    shown = second[len(first) + len(usual) + 1 :]
    assert b.ids[len(first) + len(answer) :][: len(shown) - lost] == shown[lost:]
    # Clew's ledger has what was sampled, and the whole observation behind it.
    ledger = Trajectory(theirs.task(0), 0)
    ledger.append_prompt(first)
    ledger.append_sampled(answer, [-1.0] * len(answer))
    ledger.append_prompt(shown)
    assert ledger.token_ids == first + answer + shown


# ------------------------------------------------------------------------- success, crashes, groups, data sets


class ShapedMaze(MazeEnv):
    """Gives 0.2 for every answer in the right form, and raises for some seeds."""

    def __init__(self, breaks: dict[int, str], **settings: Any) -> None:
        super().__init__(**settings)
        self.breaks = breaks

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        self.how = self.breaks.get(seed)
        if self.how == "reset":
            raise RuntimeError("no maze today")
        return super().reset(seed)

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        if self.how == "step" and self.turn == 2:
            raise RuntimeError("the floor gave way")
        observation, reward, *rest = super().step(action)
        return observation, reward + 0.2 * (parse_action(action) is not None), *rest

    def close(self) -> None:
        if self.how == "close":
            raise RuntimeError("the door is stuck")


@pytest.fixture
def shaped(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, str]]:
    """Clew's maze with a shaping reward; seed -> what of it raises."""
    from clew.runtime.skyrl import env

    breaks: dict[int, str] = {}
    monkeypatch.setattr(env, "make_env", lambda env_id, **settings: ShapedMaze(breaks, **settings))
    yield breaks


def test_success_is_not_reward(vlm: VisionLanguageModel, rows: list[dict[str, Any]], shaped: dict[int, str]) -> None:
    """SkyRL's pass_at_n counts any reward; the environment's own metric counts goals, over several batches too."""
    from skyrl.train.generators.utils import concatenate_generator_outputs, get_metrics_from_generator_output

    outputs = [generate(client(vlm, part), 1) for part in (rows[:3], rows[3:8])]
    whole = concatenate_generator_outputs([{k: v for k, v in o.items() if k != "uids"} for o in outputs])
    solved = sum(m["success"] for m in whole["env_metrics"])
    assert 0 < solved < 8
    assert get_metrics_from_generator_output(whole, [str(i) for i in range(8)])["pass_at_n"] == 1.0
    metrics = whole["rollout_metrics"]
    assert (metrics["environment/solved"], metrics["environment/episodes"]) == (solved, 8)
    assert 0 < metrics["environment/solve_rate_mean"] < 1


@pytest.mark.parametrize("how", ["reset", "step", "close"])
def test_one_crash_ends_one_episode(
    vlm: VisionLanguageModel, rows: list[dict[str, Any]], shaped: dict[int, str], how: str
) -> None:
    calm = records(generate(client(vlm, rows[:3]), 2))
    shaped[rows[1]["seed"]] = how
    output = generate(client(vlm, rows[:3]), 2)
    found = records(output)
    same = [a.ids == b.ids and a.rewards == b.rewards for a, b in zip(calm, found, strict=True)]
    metrics = output["rollout_metrics"]
    if how == "close":
        assert all(same) and metrics["environment/env_crashed"] == 0
        return
    assert same == [True, True, False, False, True, True]
    assert (metrics["environment/env_crashed"], metrics["environment/episodes"]) == (2, 4)
    for crashed in found[2:4]:
        turns = 1 if how == "reset" else 3
        assert len(crashed.grids) == turns and crashed.rewards[-1] == 0.0 and not crashed.success
    # SkyRL's trainer takes a batch only when every trajectory has images and a reward a token.
    assert all(isinstance(pixels, torch.Tensor) for pixels in output["pixel_values"])


def test_suites_are_counted_apart(recipe: Recipe) -> None:
    from clew.runtime.skyrl.env import ClewSkyRLEnv

    episodes = [
        {"suite": "heldout", "success": True, "env_crashed": False},
        {"suite": "heldout", "success": False, "env_crashed": False},
        {"suite": "larger", "success": False, "env_crashed": True},
    ]
    found = ClewSkyRLEnv.aggregate_metrics(episodes)
    assert found["solve_rate_mean"] == found["heldout/solve_rate_mean"] == 0.5
    assert (found["episodes"], found["env_crashed"], found["larger/episodes"]) == (2, 1, 0)
    assert "larger/solve_rate_mean" not in found


def test_batches_of_one_suite_add_up(recipe: Recipe, vlm: VisionLanguageModel) -> None:
    """SkyRL puts batches together by the names of their metrics, so that each has to name its suites."""
    from skyrl.train.generators.utils import concatenate_generator_outputs

    rows = heldout_rows(recipe)
    named = [row for row in rows if row["suite"] == "heldout"][:3]
    other = [{**row, "suite": "visgym:maze_2d/easy"} for row in rows if row["suite"] == "colours"][:3]
    outputs = [generate(client(vlm, part), 1) for part in (named, [*other, named[0]])]
    episodes = [m for output in outputs for m in output["env_metrics"]]
    whole = concatenate_generator_outputs([{k: v for k, v in o.items() if k != "uids"} for o in outputs])
    metrics = whole["rollout_metrics"]
    for suite, count in (("heldout", 4), ("visgym-maze_2d-easy", 3)):
        assert metrics[f"environment/{suite}/episodes"] == count
        solved = sum(m["success"] for m in episodes if m["suite"] == suite)
        assert metrics[f"environment/{suite}/solved"] == solved
    assert metrics["environment/episodes"] == 7


def test_bad_input_is_refused(vlm: VisionLanguageModel, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=r"generator\.max_turns: 14 is below the 15 turns"):
        generate(client(vlm, rows[:1]), 1, max_turns=14)
    with pytest.raises(UserError, match="write them again"):
        generate(client(vlm, [{**rows[0], "content_hash": "another"}]), 1)


@pytest.fixture(scope="module")
def files(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    return write_tasks(recipe, tmp_path_factory.mktemp("tasks"))


def read(path: Path, vlm: VisionLanguageModel) -> Any:
    from skyrl.train.dataset import PromptDataset

    return PromptDataset(str(path), vlm.tokenizer, max_prompt_length=64, num_workers=1)


def test_the_samples_of_a_group_play_one_maze(vlm: VisionLanguageModel, files: TaskFiles) -> None:
    """From the file on the disk through SkyRL's reader and generator: 8 first frames a group, all the same."""
    dataset = read(files.train, vlm)
    items = dataset.collate_fn([dataset[i] for i in range(3)])
    assert [item["env_class"] for item in items] == ["clew"] * 3
    output = generate(client(vlm, [{**i["env_extras"], "prompt": i["prompt"], "env_class": "clew"} for i in items]), 8)
    groups: dict[str, set[bytes]] = {}
    for uid, record in zip(output["uids"], records(output), strict=True):
        first = int(np.prod(record.grids[0]))
        groups.setdefault(uid, set()).add(record.pixels[:first].numpy().tobytes())
    assert [len(frames) for frames in groups.values()] == [1, 1, 1]
    assert len(set.union(*groups.values())) == 3


def maze_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Walls, start and goal, made from what the row holds."""
    import json

    maze = MazeEnv(**json.loads(row["settings"])).make(row["seed"])
    return maze.rows, maze.cols, bytes(maze.open_sides), maze.start, maze.goal


def test_train_and_heldout_are_disjoint_by_content(vlm: VisionLanguageModel, files: TaskFiles) -> None:
    train, heldout = (
        [e for _, _, e, _ in map(read(path, vlm).__getitem__, range(n))] for path, n in zip(files, (8, 48), strict=True)
    )
    assert {row["data_source"] for row in train} == {"train"}
    assert {row["data_source"] for row in heldout} == {"heldout", "larger", "braided", "colours", "longer", "stop"}
    assert len({maze_of(row) for row in train}) == len(train) == 8
    assert not {maze_of(row) for row in train} & {maze_of(row) for row in heldout}


def test_small_mazes_do_not_leak(tmp_path: Path) -> None:
    """Where seeds collide often, content still decides; and when too few mazes are left, the recipe is refused."""
    tight = (
        "environment.size=3", "environment.min_path=2", "environment.max_path=3", "environment.max_turns=4",
        'evaluation.suites=["heldout"]', "evaluation.size=40", "evaluation.confirm_size=40",
    )  # fmt: skip
    recipe = load_recipe("laptop", (*tight, "training.steps=10", "training.prompts_per_step=20"))
    train, heldout = ([maze_of(row) for row in make(recipe)] for make in (training_rows, heldout_rows))
    assert len(set(train)) == 200 and len(set(heldout)) == 40 and not set(train) & set(heldout)
    with pytest.raises(UserError, match=r"training\.steps: only [\d,]+ different tasks were found"):
        training_rows(load_recipe("laptop", (*tight, "training.steps=1000", "training.prompts_per_step=20")))


def test_the_same_recipe_gives_the_same_files(recipe: Recipe, files: TaskFiles, tmp_path: Path) -> None:
    again = write_tasks(recipe, tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in files]
