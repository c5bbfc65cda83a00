"""The vLLM engine samples what the trainer scores, under the version it says.

All tests share one engine. They need vLLM: `make test-vllm` runs them from .venvs/vllm.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import tiny
import torch

from clew.agent.ledger import StopReason, Trajectory, Turn
from clew.checkpoint import write_directory
from clew.envs import MazeEnv
from clew.errors import UserError
from clew.evaluation.suites import RecipeSuites
from clew.policy.adapter import Adapter, StoredAdapter, attach_lora, current_adapter, write_adapter
from clew.policy.export import export_adapter
from clew.policy.model import ModelProcessor, VisionLanguageModel, collate, load_model, load_processor, score
from clew.policy.paths import resolve_model_path
from clew.recipe import ModelTable, load_recipe
from clew.rollout.engine import Sampling
from clew.rollout.episodes import Limits, Player, play
from clew.rollout.transformers_engine import TransformersEngine
from clew.rollout.vllm_engine import VllmEngine
from clew.rollout.vllm_options import LORA_RANKS, VllmSettings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: run `make test-vllm`"),
]
SUITES = RecipeSuites(load_recipe("laptop"))
LIMITS = Limits(1024)
SETTINGS = VllmSettings("float32", LIMITS.max_tokens, 15, 64, 16, 0.45)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, but rather than begin an answer it would say an image placeholder, if it could."""
    folder = tmp_path_factory.mktemp("model") / "eager"
    shutil.copytree(resolve_model_path(ModelTable(path="package:warm-start")), folder)
    vlm = load_model(folder)
    rows, begin = vlm.model.lm_head.weight, vlm.tokenizer.convert_tokens_to_ids("<action>")
    with torch.no_grad():
        rows[vlm.template.image_token_id] = 2 * rows[begin]
    vlm.model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def vlm(folder: Path) -> VisionLanguageModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def processor(folder: Path) -> ModelProcessor:
    return load_processor(folder)


@pytest.fixture(scope="module")
def engine(processor: ModelProcessor) -> VllmEngine:
    return VllmEngine(processor, SETTINGS, "cpu")


@pytest.fixture
def base(engine: VllmEngine) -> Iterator[VllmEngine]:
    """The engine with the base model and an empty house."""
    engine.release()
    engine.load_adapter(None)
    yield engine
    assert not engine._running and not engine._images, "a test left requests or images behind"


def maze_env() -> MazeEnv:
    return MazeEnv(**SUITES.settings)


def rollout(
    engine: Any,
    vlm: VisionLanguageModel | ModelProcessor,
    *,
    mazes: int = 8,
    samples: int = 2,
    temperature: float = 1.0,
    max_new_tokens: int = 8,
    part: Any = "t",
) -> list[Trajectory]:
    attempts = list(itertools.product(SUITES.suite("heldout").tasks[:mazes], range(samples)))
    player = Player(vlm.template, vlm.patcher)
    return play(engine, player, maze_env, attempts, Sampling(temperature, max_new_tokens), LIMITS, (part,))


def sampled_logprobs(trajectories: list[Trajectory]) -> torch.Tensor:
    return torch.tensor([lp for t in trajectories for lp, s in zip(t.logprobs, t.sampled, strict=True) if s])


@torch.no_grad()
def gaps(vlm: VisionLanguageModel, trajectories: list[Trajectory], temperature: float = 1.0) -> torch.Tensor:
    """|engine - scorer| of every sampled token's log-probability, in nats."""
    triples = [(t.token_ids, t.sampled, t.grids) for t in trajectories]
    batch = collate(triples, vlm.template.image_token_id, vlm.merge_size)
    features = tiny.feature_cache(vlm).gather([turn.frame for t in trajectories for turn in t.turns])
    return (score(vlm, batch, features, temperature).logprobs_N - sampled_logprobs(trajectories)).abs()


def adapted(folder: Path, step: int, **lora: Any) -> tuple[VisionLanguageModel, Adapter]:
    """A policy with a random adapter that changes much, and the adapter."""
    vlm = load_model(folder)
    policy = attach_lora(vlm, **{"rank": 4, "alpha": 8, "dropout": 0.0, "seed": step, **lora})
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return vlm, current_adapter(policy, step)


def stored(adapter: Adapter, folder: Path) -> StoredAdapter:
    write_directory(folder / adapter.name, lambda staging: write_adapter(adapter, staging), {})
    return StoredAdapter(adapter.name, folder / adapter.name)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_episodes_keep_the_ledger_and_the_scorer_agrees(
    base: VllmEngine, vlm: VisionLanguageModel, temperature: float
) -> None:
    trajectories = rollout(base, vlm, temperature=temperature)
    assert len({t.stop_reason for t in trajectories}) > 1 and len({len(t.turns) for t in trajectories}) > 1
    for t in trajectories:
        t.check_images(vlm.template.image_token_id, vlm.merge_size)
        assert len(t.token_ids) == len(t.sampled) == len(t.logprobs) and t.policy_version == "base"
        assert all(lp == 0.0 for lp, s in zip(t.logprobs, t.sampled, strict=True) if not s)
        assert all(t.token_ids[turn.end - 1] == vlm.template.end_of_turn_id for turn in t.turns)
    gap = gaps(vlm, trajectories, temperature)
    print(
        f"temperature {temperature}: engine - scorer of {len(gap)} tokens, mean {gap.mean():.2e}, max {gap.max():.2e}"
    )
    assert gap.max() < 1e-4


def test_frames_are_cut_as_the_trainer_cuts_them(base: VllmEngine, vlm: VisionLanguageModel) -> None:
    """Sizes that fit, that must be rounded and that are enlarged: one resize, the same as the trainer's."""

    def make_env() -> tiny.WordEnv:
        return tiny.WordEnv(max_turns=4, sizes=((64, 96), (50, 90), (20, 40)))

    assert {vlm.patcher.grid(tiny.noise(0, *size)) for size in ((64, 96), (50, 90))} == {(1, 4, 6)}
    tasks = [(make_env().task(seed), 0) for seed in range(12)]
    trajectories = play(base, Player(vlm.template, vlm.patcher), make_env, tasks, Sampling(1.0, 8), LIMITS, ("sizes",))
    shapes = {turn.frame.shape[:2] for t in trajectories for turn in t.turns}
    assert shapes == {(64, 96), (50, 90), (20, 40)}
    assert gaps(vlm, trajectories).max() < 1e-4


def test_greedy_episodes_are_the_transformers_engines(base: VllmEngine, vlm: VisionLanguageModel) -> None:
    theirs = rollout(TransformersEngine(vlm, tiny.feature_cache(vlm)), vlm, mazes=16, samples=1, temperature=0.0)
    ours = rollout(base, vlm, mazes=16, samples=1, temperature=0.0)
    same = [a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)]
    print(
        f"greedy: {sum(same)} of {len(same)} episodes token for token the same; {sum(t.success for t in ours)} solved"
    )
    assert sum(same) >= 15  # one may hang on a tie in the last bit
    for a, b in zip(ours, theirs, strict=True):
        if a.token_ids == b.token_ids:
            assert (a.success, a.reward, a.stop_reason) == (b.success, b.reward, b.stop_reason)
            np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-4)  # at temperature 1


def test_an_exported_adapter_is_applied_whole(base: VllmEngine, folder: Path, tmp_path: Path) -> None:
    """What ``clew export`` writes loads in vLLM, in every layer: the scorer with the adapter attached agrees."""
    plain = rollout(base, base.processor)
    policy, adapter = adapted(folder, 7)
    card = {"base_model": "m", "base_sha256": "0", "step": 7, "recipe": "r", "seed": 0, "environment": {}}
    exported = export_adapter(adapter, tmp_path / "step-000007", card, 1.0)
    base.load_adapter(StoredAdapter(adapter.name, exported))
    trajectories = rollout(base, policy)
    assert {t.policy_version for t in trajectories} == {base.version} == {adapter.name}
    assert [t.token_ids for t in trajectories] != [t.token_ids for t in plain]
    gap = gaps(policy, trajectories)
    print(f"adapter: engine - scorer of {len(gap)} tokens, mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert gap.max() < 1e-4
    assert gaps(load_model(folder), trajectories).max() > 0.1, "the adapter should change the log-probabilities"


def test_versions_switch_and_share_no_keys_and_values(base: VllmEngine, folder: Path, tmp_path: Path) -> None:
    """The same prompts under one version after another, and the first again: each time that version's numbers."""
    versions = [adapted(folder, 1), adapted(folder, 2, rank=16, target=("q_proj", "v_proj"))]
    names = [stored(adapter, tmp_path) for _, adapter in versions]
    played: dict[str, torch.Tensor] = {}
    for (policy, adapter), name in [(v, n) for v, n in zip(versions, names, strict=True)] * 2:
        base.load_adapter(name)
        trajectories = rollout(base, policy)
        assert {t.policy_version for t in trajectories} == {adapter.name}
        assert gaps(policy, trajectories).max() < 1e-4
        logprobs = sampled_logprobs(trajectories)
        if adapter.name in played:
            torch.testing.assert_close(logprobs, played[adapter.name], rtol=0, atol=1e-4)
        played[adapter.name] = logprobs
        assert len(base._llm.list_loras()) == 1, "its predecessor should have made room"
    first, second = played.values()
    assert first.shape != second.shape or not torch.allclose(first, second, atol=0.01)
    base.load_adapter(None)
    assert base.version == "base"
    assert gaps(load_model(folder), rollout(base, base.processor)).max() < 1e-4


def test_prefixes_are_kept_for_each_version(
    base: VllmEngine, vlm: VisionLanguageModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again, a prompt's full blocks come from the cache, but only under the version that computed them."""
    step, cached = base._llm.step, []

    def counting_step() -> list[Any]:
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    def ask() -> list[int]:
        cached.clear()
        for number in range(4):
            trajectory = opening(vlm, number)
            base.submit(trajectory, Sampling(0.0, 1), 0)
            base.collect()
            base.abandon(trajectory)
        return cached.copy()

    monkeypatch.setattr(base._llm, "step", counting_step)
    one, two = (stored(adapted(folder, step)[1], tmp_path) for step in (11, 12))
    found = []
    for version in (one, one, two, one):
        base.load_adapter(version)
        found.append(ask())
    assert found == [[0] * 4, [32] * 4, [0] * 4, [32] * 4]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_forbidden_tokens_are_never_sampled(base: VllmEngine, vlm: VisionLanguageModel, temperature: float) -> None:
    """The model likes nothing better than an image placeholder, and can't say one."""
    trajectories = rollout(base, vlm, temperature=temperature)
    start = trajectories[0].turns[0].start
    inputs = tiny.plain_inputs(vlm, trajectories[0].token_ids[:start], [trajectories[0].turns[0].frame])
    with torch.no_grad():
        logits = vlm.model(**inputs).logits[0, -1]
    assert int(logits.argmax()) == vlm.template.image_token_id
    sampled = {i for t in trajectories for i, s in zip(t.token_ids, t.sampled, strict=True) if s}
    assert sampled and not sampled & set(vlm.forbidden_ids.tolist())


def test_the_seed_makes_the_draws(base: VllmEngine, vlm: VisionLanguageModel) -> None:
    """The same seeds give the same tokens, whoever plays beside; other seeds give others."""
    first = {(t.task.seed, t.sample): t.token_ids for t in rollout(base, base.processor, mazes=6, samples=3)}
    again = {(t.task.seed, t.sample): t.token_ids for t in rollout(base, base.processor, mazes=3, samples=2)}
    assert all(first[key] == ids for key, ids in again.items())
    other = {(t.task.seed, t.sample): t.token_ids for t in rollout(base, base.processor, mazes=6, samples=3, part="u")}
    assert sum(first[key] == other[key] for key in first) <= 3
    one_maze = {tuple(ids) for (seed, _), ids in first.items() if seed == SUITES.suite("heldout").tasks[0].seed}
    assert len(one_maze) == 3
    # All 64 bits are taken: the largest seed, whose signed value would be vLLM's word for none, repeats itself too.
    trajectory = opening(vlm)
    draws = []
    for seed in [2**64 - 1] * 2 + [2**63 - 2]:
        base.submit(trajectory, Sampling(2.0, 8), seed)
        draws.append(base.collect()[0][1].ids)
    base.abandon(trajectory)
    assert draws[0] == draws[1] != draws[2]


def opening(vlm: VisionLanguageModel, number: int = 0) -> Trajectory:
    """A trajectory that waits for its first answer."""
    env, task = maze_env(), SUITES.suite("heldout").tasks[number]
    observation, _ = env.reset(task.seed)
    trajectory, grid = Trajectory(task, 0), vlm.patcher.grid(observation.image)
    ids = vlm.template.opening(env.prompt, observation.text, grid[0] * grid[1] * grid[2] // vlm.merge_size**2)
    trajectory.append_prompt(ids, grid)
    trajectory.turns.append(Turn(observation.text, observation.image))
    return trajectory


def test_answers_come_as_they_end_and_what_is_abandoned_never_comes(base: VllmEngine, vlm: VisionLanguageModel) -> None:
    short, long, dropped = (opening(vlm, number) for number in range(3))
    base.submit(long, Sampling(1.0, 64), 1)
    base.submit(dropped, Sampling(1.0, 64), 2)
    base.submit(short, Sampling(1.0, 1), 3)
    ((first, completion),) = base.collect()
    assert first is short and len(completion.ids) == 1 and not completion.ended
    base.abandon(dropped)
    base.abandon(dropped)
    ((second, completion),) = base.collect()
    assert second is long and completion.ended and completion.ids[-1] == base.processor.template.end_of_turn_id
    assert base.collect() == []
    base.abandon(short)
    base.abandon(long)
    assert not base._llm.has_unfinished_requests()
    assert gaps(load_model(base.processor.path), rollout(base, base.processor)).max() < 1e-4


def test_an_answer_that_is_cut(base: VllmEngine) -> None:
    for trajectory in rollout(base, base.processor, max_new_tokens=3):
        assert trajectory.stop_reason == StopReason.TURN_TOKENS
        (turn,) = trajectory.turns
        assert turn.end - turn.start == 3
        assert trajectory.token_ids[-1] != base.processor.template.end_of_turn_id


def test_each_image_is_processed_once(base: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that were shown before, by any trajectory, are not cut into patches again, until they are dropped."""
    calls: list[int] = []
    image_processor = base._llm.renderer.get_mm_processor().info.get_image_processor()
    plain = type(image_processor).preprocess

    def preprocess(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(images))
        return plain(self, images, *args, **kwargs)

    monkeypatch.setattr(type(image_processor), "preprocess", preprocess)
    trajectories = rollout(base, base.processor, mazes=4, samples=4)
    frames = {turn.frame.tobytes() for t in trajectories for turn in t.turns}
    assert sum(calls) == len(frames) < sum(len(t.turns) for t in trajectories)
    rollout(base, base.processor, mazes=4, samples=4)
    assert sum(calls) == len(frames)
    base.release()
    rollout(base, base.processor, mazes=4, samples=4)
    assert sum(calls) == 2 * len(frames)


def test_a_request_whose_images_got_lost_is_sent_again(
    base: VllmEngine, vlm: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's two processes can disagree on what is cached: it then ends the request with an error, once."""
    step, failures = base._llm.step, iter([True])

    def failing_step() -> list[Any]:
        outputs = step()
        for output in outputs:
            if next(failures, False):
                output.outputs[0].finish_reason = "error"
        return outputs

    monkeypatch.setattr(base._llm, "step", failing_step)
    trajectory = opening(vlm)
    base.submit(trajectory, Sampling(1.0, 8), 1)
    ((_, completion),) = base.collect()
    assert completion.ended
    failures = iter([True, True])
    base.submit(trajectory, Sampling(1.0, 8), 1)
    with pytest.raises(RuntimeError, match="twice"):
        base.collect()
    base.abandon(trajectory)


def test_misuse_is_refused(base: VllmEngine, vlm: VisionLanguageModel) -> None:
    trajectory = opening(vlm)
    for temperature in (0.005, 2.1):
        with pytest.raises(UserError, match=r"rollout\.temperature"):
            base.submit(trajectory, Sampling(temperature, 8), 1)
    wrong = opening(vlm)
    wrong.token_ids.insert(wrong.token_ids.index(vlm.template.image_token_id), vlm.template.image_token_id)
    with pytest.raises(ValueError, match="not the"):
        base.submit(wrong, Sampling(1.0, 8), 1)
    base.submit(trajectory, Sampling(1.0, 8), 1)
    with pytest.raises(RuntimeError, match="still being sampled"):
        base.load_adapter(None)
    base.release()


def test_sleep_is_for_gpus(base: VllmEngine) -> None:
    """On a CPU it does nothing and does no harm. (What it does on a GPU can't be tested on one without.)"""
    before = rollout(base, base.processor, mazes=2)
    base.sleep()
    assert not base._asleep
    base.wake()
    assert [t.token_ids for t in rollout(base, base.processor, mazes=2)] == [t.token_ids for t in before]


def test_the_ranks_are_those_that_vllm_knows(base: VllmEngine) -> None:
    from vllm.config.lora import MaxLoRARanks

    assert set(LORA_RANKS) <= set(get_args(MaxLoRARanks))
