"""Imitation: the right mazes, the right tokens, and the same bits after an interruption."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from clew.agent.ledger import Trajectory, Turn
from clew.checkpoint import CheckpointStore
from clew.envs.base import Task
from clew.envs.maze import Maze
from clew.envs.maze_env import MazeEnv, parse_action
from clew.envs.suites import belongs_to_imitation
from clew.errors import UserError
from clew.policy.model import load_model
from clew.recipe import SftTable
from clew.training import sft
from clew.training.demonstrations import Demonstration, Demonstrator
from clew.training.sft import (
    SftProgress,
    accumulate_gradients,
    draw,
    learning_rate_scale,
    new_model,
    train_sft,
)

SETTINGS: dict[str, Any] = {"size": (4, 4), "min_path": 3, "max_path": 8, "max_turns": 9}


class Watched(MazeEnv):
    """Remembers what was played: the mazes started, and each step's outcome."""

    def __init__(self) -> None:
        super().__init__(**SETTINGS)
        self.mazes: list[Maze] = []
        self.outcomes: list[list[dict[str, Any]]] = []

    def start(self, maze: Maze):  # type: ignore[no-untyped-def]
        self.mazes.append(maze)
        self.outcomes.append([])
        return super().start(maze)

    def step(self, action: str):  # type: ignore[no-untyped-def]
        best = action in [self.move_text(d) for d in self.best_moves()]
        result = super().step(action)
        self.outcomes[-1].append({**result[4], "best": best})
        return result


def table(**changes: Any) -> SftTable:
    small = {
        "steps": 6,
        "episode_steps": 2,
        "frames_per_step": 6,
        "frames_per_microbatch": 4,
        "curriculum_steps": 3,
    }
    return SftTable(**{**small, **changes})


def drawn(step: int, held_out: frozenset[str] = frozenset(), **changes: Any) -> tuple[list[Demonstration], Watched]:
    env = Watched()
    return draw(Demonstrator(tiny.shared_tiny(), env, held_out), table(**changes), step), env


def test_only_answers_carry_loss() -> None:
    vlm = tiny.shared_tiny()
    for step in (1, 6):
        for demonstration in drawn(step)[0]:
            spans: list[list[int]] = []
            previous = False
            for token, answered in zip(demonstration.token_ids, demonstration.answered, strict=True):
                if answered and not previous:
                    spans.append([])
                if answered:
                    spans[-1].append(token)
                previous = answered
            texts = [vlm.tokenizer.decode(span) for span in spans]
            assert len(texts) == len(demonstration.frames) == len(demonstration.grids)
            for text in texts:
                assert text.endswith("<|im_end|>") and parse_action(text.removesuffix("<|im_end|>")) in (
                    "up",
                    "down",
                    "left",
                    "right",
                )
            rest = [t for t, a in zip(demonstration.token_ids, demonstration.answered, strict=True) if not a]
            assert "You are the blue disc" in vlm.tokenizer.decode(rest)


def as_trajectory(demonstration: Demonstration) -> Trajectory:
    trajectory = Trajectory(Task("t", 0, "t"), 0, token_ids=demonstration.token_ids, sampled=demonstration.answered)
    trajectory.turns = [Turn("", frame) for frame in demonstration.frames]
    trajectory.grids = demonstration.grids
    return trajectory


def test_the_loss_and_its_gradient_are_the_plain_ones() -> None:
    """Mean over all answer tokens of the step, whatever the micro-batches; the vision tower learns too."""
    demonstrations, _ = drawn(4, frames_per_step=12)
    gradients = []
    for budget in (1, 5, 1000):
        vlm = tiny.tiny()
        loss, probability = accumulate_gradients(vlm, demonstrations, budget)
        gradients.append((loss, probability, {n: p.grad for n, p in vlm.model.named_parameters()}))
    vlm = tiny.tiny()
    logprobs = torch.cat([tiny.plain_logprobs(vlm, vlm.model, as_trajectory(d), 1.0)[0] for d in demonstrations])
    (-logprobs.mean()).backward()
    answers = sum(len(d.frames) for d in demonstrations)
    for loss, probability, found in gradients:
        assert loss == pytest.approx(-float(logprobs.detach().mean()), abs=1e-4)
        assert probability == pytest.approx(float((logprobs.detach().sum() / answers).exp()), rel=1e-3)
        for name, parameter in vlm.model.named_parameters():
            assert (found[name] is None) == (parameter.grad is None)
            if parameter.grad is not None:
                torch.testing.assert_close(found[name], parameter.grad, rtol=2e-3, atol=2e-5, msg=name)
    assert gradients[0][2]["model.visual.patch_embed.proj.weight"].abs().max() > 0


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6])
def test_curriculum(step: int) -> None:
    """Windows of perfect play near the goal first, then anywhere; whole fallible episodes at the end."""
    demonstrations, env = drawn(step, frames_per_step=40, curriculum_steps=30, window_turns=2)
    kept = [(m, o) for m, o in zip(env.mazes, env.outcomes, strict=True) if o]
    if step <= 4:
        assert all(m.path_length <= 2 + step for m, _ in kept)
        assert max(m.path_length for m, _ in kept) == 2 + step
        assert all(len(o) == min(2, m.path_length) for m, o in kept)
        assert all(turn["best"] for _, o in kept for turn in o)
        assert len(kept) == len(demonstrations)
    else:
        won = [o for _, o in kept if o[-1]["success"]]
        assert len(won) == len(demonstrations), "an episode that fails is not shown"
        assert [len(o) for o in won] == [len(d.frames) for d in demonstrations]
        assert any(not turn["best"] for o in won for turn in o), "the navigator is fallible"
        assert all(3 <= m.path_length <= 8 for m, _ in kept)
    assert sum(len(d.frames) for d in demonstrations) >= 40 > sum(len(d.frames) for d in demonstrations[:-1])


def played(env: Watched) -> set[str]:
    return {maze.content_hash for maze, outcomes in zip(env.mazes, env.outcomes, strict=True) if outcomes}


@pytest.mark.parametrize("step", [2, 6])
def test_held_out_mazes_and_those_of_reinforcement_learning_are_not_shown(step: int) -> None:
    _, env = drawn(step, frames_per_step=60)
    shown = played(env)
    assert len(shown) > 10 and all(belongs_to_imitation(h) for h in shown)
    _, again = drawn(step, held_out=frozenset(shown), frames_per_step=60)
    assert played(again) and not shown & played(again)


def test_demonstrations_depend_on_seed_and_step_alone() -> None:
    def ids(step: int, seed: int) -> list[list[int]]:
        random.seed(random.random())
        return [d.token_ids for d in drawn(step, seed=seed, frames_per_step=20)[0]]

    assert ids(3, 0) == ids(3, 0)
    assert ids(3, 0) != ids(4, 0) and ids(3, 0) != ids(3, 1)


def test_new_models_are_their_seeds(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.manual_seed(len(name))
        new_model(tmp_path / name, SftTable(seed=seed), MazeEnv())
    files = {name: {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in "abc"}
    assert files["a"] == files["b"]
    assert files["a"]["model.safetensors"] != files["c"]["model.safetensors"]
    assert files["a"]["tokenizer.json"] == files["c"]["tokenizer.json"]


def trained(folder: Path, stop_after: int | None = None) -> tuple[str, list[SftProgress]]:
    vlm = load_model(tiny.tiny_folder())
    seen: list[SftProgress] = []

    def report(progress: SftProgress) -> None:
        seen.append(progress)
        if progress.step == stop_after:
            raise KeyboardInterrupt

    held_out: frozenset[str] = frozenset()
    train_sft(vlm, MazeEnv(**SETTINGS), table(), held_out, CheckpointStore(folder, 2), report)
    assert not vlm.model.training
    return tiny.weights_digest(vlm.model), seen


@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_going_on_equals_not_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int, whole: Callable[[], Any]
) -> None:
    """Stopped before the first checkpoint, between two, and right after one (every second step here)."""
    monkeypatch.setattr(sft, "CHECKPOINT_EVERY", 2)
    digest, progress = whole()
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", stop_after)
    again, rest = trained(tmp_path / "run")
    assert again == digest
    assert [p.step for p in rest] == list(range(1 + stop_after // 2 * 2, 7))
    losses = {p.step: p.loss for p in progress}
    assert all(p.loss == losses[p.step] for p in rest)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    result: list[Any] = []

    def make() -> Any:
        if not result:
            result.append(trained(tmp_path_factory.mktemp("whole")))
        return result[0]

    return make


def test_it_learns(whole: Callable[[], Any]) -> None:
    """A handful of steps from random weights: the loss falls."""
    _, progress = whole()
    assert progress[-1].loss < progress[0].loss
    assert all(0 < p.answer_probability < 1 for p in progress)


def test_learning_rate() -> None:
    scales = [learning_rate_scale(step, 1000) for step in range(1, 1001)]
    assert scales[0] == pytest.approx(1 / 20) and max(scales) == 1.0
    assert 0 < scales[-1] < 0.01
    top = [i for i, s in enumerate(scales) if s == 1.0]
    assert top == list(range(top[0], top[-1] + 1)) and top[0] == 19
    assert scales[top[-1] :] == sorted(scales[top[-1] :], reverse=True)


def test_a_hopeless_demonstrator_says_so() -> None:
    """No navigator that errs always, within a cap of the path itself, ever wins; and somebody has to say it."""

    class Never(Watched):
        def step(self, action: str):  # type: ignore[no-untyped-def]
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, reward, terminated, truncated, {**info, "success": False}

    with pytest.raises(UserError, match=r"sft\.random_moves = 0\.5: no demonstration .* succeeded"):
        Demonstrator(tiny.shared_tiny(), Never(), frozenset()).episode(random.Random(0), 0.5)
    everything = type("Everything", (frozenset,), {"__contains__": lambda self, item: True})()
    with pytest.raises(UserError, match=r"none is left to imitate"):
        Demonstrator(tiny.shared_tiny(), Watched(), everything).window(random.Random(0), 2, 4)
