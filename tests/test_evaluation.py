"""Evaluation counts honestly, says how sure it is, and tells sight from luck."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from clew.agent.ledger import Trajectory
from clew.envs.base import ImageEnv, Suite
from clew.envs.maze_env import MazeEnv, answer_text
from clew.envs.suites import maze_suite
from clew.evaluation.evaluate import (
    WALKS,
    Result,
    SwappedFrames,
    blank_frames,
    evaluate,
    reference,
    replay,
    write_result,
)
from clew.evaluation.suites import RecipeSuites, longest_episode, token_budget
from clew.evaluation.wilson import wilson_interval
from clew.recipe import load_recipe
from clew.rollout.engine import Sampling
from clew.rollout.episodes import Limits, Player
from clew.rollout.rollouts import LocalRollouts

VLM = tiny.shared_tiny()
PLAYER = Player(VLM.template, VLM.patcher)
SETTINGS = {"size": (4, 4), "min_path": 3, "max_path": 6, "max_turns": 8}
SUITE = maze_suite("heldout", SETTINGS, 12)


def score_test_bounds(solved: int, total: int) -> tuple[float, float]:
    """The rates that a two-sided score test at 5 % does not reject, by bisection."""
    z = 1.959963984540054
    p = solved / total

    def excess(rate: float) -> float:
        return abs(p - rate) - z * math.sqrt(rate * (1 - rate) / total)

    def bisect(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if excess(middle) <= 0 else (inside, middle)
        return inside

    return (0.0 if solved == 0 else bisect(p, 0.0)), (1.0 if solved == total else bisect(p, 1.0))


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_inverts_the_score_test(count: tuple[int, int]) -> None:
    low, high = wilson_interval(*count)
    assert (low, high) == pytest.approx(score_test_bounds(*count), abs=1e-9)
    assert 0 <= low <= count[0] / count[1] <= high <= 1
    mirrored = wilson_interval(count[1] - count[0], count[1])
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_wilson_of_the_published_figures() -> None:
    assert wilson_interval(28, 64) == pytest.approx((0.3231, 0.5591), abs=5e-4)
    assert wilson_interval(62, 64) == pytest.approx((0.8930, 0.9914), abs=5e-4)
    assert wilson_interval(0, 64)[0] == 0.0 and wilson_interval(64, 64)[1] == 1.0
    assert wilson_interval(64, 64)[0] == pytest.approx(64 / (64 + 3.841459), abs=1e-6)
    for bad in ((-1, 5), (6, 5), (0, 0)):
        with pytest.raises(ValueError):
            wilson_interval(*bad)


def walker(goes_wrong: int = 0):
    """Says the best action for the maze that the FRAME shows; the first ``goes_wrong`` say nonsense."""
    mazes = [MazeEnv(**SETTINGS) for _ in SUITE.tasks]
    shown: dict[bytes, str] = {}
    for env, task in zip(mazes, SUITE.tasks, strict=True):
        env.reset(task.seed)
        for room in range(16):
            env.room = room
            if room != env.maze.goal:
                shown[env.frame().tobytes()] = env.oracle_action()
    wrong = {task.seed for task in SUITE.tasks[:goes_wrong]}

    def say(trajectory: Trajectory) -> str:
        if trajectory.task.seed in wrong:
            return "nonsense"
        return shown.get(trajectory.turns[-1].frame.tobytes(), answer_text("up"))

    return say


def run(say, suite: Suite = SUITE, make=lambda: MazeEnv(**SETTINGS), limits: Limits | None = None, **options) -> Result:
    engine = tiny.ScriptedEngine(VLM, say)
    return evaluate(
        LocalRollouts(engine, PLAYER),  # type: ignore[arg-type]
        make,
        suite,
        "sampled",
        10,
        Sampling(1.0, 8),
        limits or Limits(4000),
        ("e", 1),
        **options,
    )


def test_counts_and_path_lengths() -> None:
    result = run(walker(goes_wrong=3))
    assert (result.solved, result.total, result.solve_rate) == (9, 12, 0.75)
    table = result.by_path_length()
    assert sum(row["total"] for row in table.values()) == 12
    assert sum(row["solved"] for row in table.values()) == 9
    assert list(table) == sorted(table, key=int)
    env = MazeEnv(**SETTINGS)
    for length, row in table.items():
        seeds = [t.seed for t in SUITE.tasks if env.make(t.seed).path_length == int(length)]
        assert row["total"] == len(seeds)
        assert row["solved"] == sum(seed not in {t.seed for t in SUITE.tasks[:3]} for seed in seeds)
    for episode, task in zip(result.episodes, SUITE.tasks, strict=True):
        assert (episode["seed"], episode["content_hash"]) == (task.seed, task.content_hash)
        if episode["success"]:
            assert len(episode["actions"]) == episode["turns"] == episode["path_length"]
            assert set(episode["actions"]) <= {"up", "down", "left", "right"}
        else:
            assert episode["actions"] == ["nonsense"] * 8 and episode["stop_reason"] == "turn_cap"


def test_batches_change_nothing() -> None:
    assert run(walker(2), batch=5).episodes == run(walker(2)).episodes == run(walker(2), batch=1).episodes


def test_infrastructure_counts_as_unsolved() -> None:
    """Leaving a crashed episode out would let crashes raise the rate."""
    broken = {SUITE.tasks[1].seed, SUITE.tasks[4].seed}

    class Crashing(MazeEnv):
        def reset(self, seed: int):  # type: ignore[no-untyped-def]
            if seed in broken:
                raise RuntimeError("crash")
            return super().reset(seed)

    def crashing() -> ImageEnv:
        return Crashing(**SETTINGS)

    result = run(walker(), make=crashing)
    assert (result.solved, result.total) == (10, 12)
    assert [e["seed"] for e in result.episodes if e["stop_reason"] == "env_crashed"] == [
        t.seed for t in SUITE.tasks if t.seed in broken
    ]
    assert result.by_path_length()["None"] == {"solved": 0, "total": 2}
    late = run(walker(), limits=Limits(4000, deadline_s=-1.0))
    assert (late.solved, late.total) == (0, 12)
    assert {e["stop_reason"] for e in late.episodes} == {"deadline"}
    assert all(e["turns"] == 0 and e["actions"] == [] for e in late.episodes)


def test_blank_frames_hide_everything() -> None:
    result = run(walker(), see=blank_frames)
    frames = {turn.frame.tobytes() for t in result.trajectories for turn in t.turns}
    assert len(frames) == 1
    assert result.solved < 6


def test_swapped_frames_show_the_next_maze_walked_by_the_same_answers() -> None:
    result = run(walker(), see=SwappedFrames(SUITE), batch=5)
    for i, trajectory in enumerate(result.trajectories):
        other = MazeEnv(**SETTINGS)
        observation, _ = other.reset(SUITE.tasks[(i + 1) % 12].seed)
        frame = observation.image
        for turn in trajectory.turns:
            assert np.array_equal(turn.frame, frame)
            if not other.over:
                frame = other.step(turn.answer)[0].image
        assert trajectory.task == SUITE.tasks[i]
    assert result.solved < 6, "a walker that sees another maze is lost in its own"


def test_references() -> None:
    oracle = reference(SUITE, "oracle", 0)
    assert oracle.solved == oracle.total == 12 and oracle.step is None
    assert all(e["turns"] == e["path_length"] for e in oracle.episodes)
    for policy in ("random", "no-turn-back"):
        result = reference(SUITE, policy, 0)
        assert result.total == 12 * WALKS and 0 < result.solved < result.total / 2
        assert result.episodes == reference(SUITE, policy, 0).episodes != reference(SUITE, policy, 1).episodes
        assert [e["seed"] for e in result.episodes[::WALKS]] == [t.seed for t in SUITE.tasks]
        assert result.episodes[0]["actions"] != result.episodes[1]["actions"], "each walk is a walk of its own"
        for episode in result.episodes:
            assert episode["turns"] <= 8 and (episode["stop_reason"] == "success") == episode["success"]
    env = MazeEnv(**SETTINGS)
    for episode in reference(SUITE, "no-turn-back", 0).episodes:
        env.reset(episode["seed"])
        assert all(env.step(answer_text(a))[4]["feedback"] in ("moved", "reached") for a in episode["actions"])


def test_files(tmp_path: Path) -> None:
    result = run(walker(goes_wrong=1))
    write_result(tmp_path, result, VLM.tokenizer)
    record = json.loads((tmp_path / "eval/step-000010/heldout.sampled.json").read_text())
    assert (record["step"], record["suite"], record["mode"]) == (10, "heldout", "sampled")
    assert (record["solved"], record["total"], record["solve_rate"]) == (11, 12, 11 / 12)
    assert record["ci95"] == list(wilson_interval(11, 12)) and len(record["episodes"]) == 12
    lines = (tmp_path / "replays/step-000010/heldout.sampled.jsonl").read_text().splitlines()
    assert len(lines) == 12
    for line, trajectory in zip(lines, result.trajectories, strict=True):
        content = json.loads(line)
        assert content == replay(trajectory, VLM.tokenizer)
        for turn, shown in zip(trajectory.turns, content["turns"], strict=True):
            picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown["frame"]))))
            assert np.array_equal(picture, turn.frame)
        # Every token is there once, image placeholders as runs.
        pads = [e for e in content["tokens"] if e["t"].startswith("<|image_pad|> x ")]
        counts = [int(e["t"].rsplit(" ", 1)[1]) for e in pads]
        assert counts == [t * h * w // VLM.merge_size**2 for t, h, w in trajectory.grids]
        assert len(content["tokens"]) - len(pads) + sum(counts) == len(trajectory.token_ids)
        assert sum(e["m"] for e in content["tokens"]) == sum(trajectory.sampled)
        assert all((e["lp"] is not None) == bool(e["m"]) for e in content["tokens"])
    row = reference(SUITE, "random", 0)
    write_result(tmp_path, row)
    content = json.loads((tmp_path / "eval/references/heldout.random.json").read_text())
    assert content["step"] is None and content["mode"] == "random" and content["solved"] == row.solved


def test_the_longest_episode_of_a_recipe_is_that_of_its_largest_suite() -> None:
    """An engine that must know beforehand is told of the longest, not of those that are trained on."""
    laptop = load_recipe("laptop")
    # "larger" has 6 x 8 cells and 20 turns where 4 x 6 and 15 are trained on; "longer" has 24 turns.
    assert longest_episode(laptop) == (math.ceil(1024 * (6 * 8 * 20) / (4 * 6 * 15)), 24)
    assert longest_episode(load_recipe("laptop", ['evaluation.suites=["heldout"]'])) == (1024, 15)
    suites = RecipeSuites(laptop)
    settings = [suites.suite(name).env_kwargs for name in (*laptop.evaluation.suites, "unseen")]
    assert max(token_budget(laptop, s) for s in settings) == longest_episode(laptop)[0]
    assert max(s["max_turns"] for s in settings) == longest_episode(laptop)[1]
