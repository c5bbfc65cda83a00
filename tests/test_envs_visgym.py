"""VisGym's tasks: against recorded mazes, in a stand-in for the fork, and in the real one where CLEW_VISGYM names it.

The stand-in (tests/standin_visgym) is played by the same child process as the real fork.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from clew.agent.ledger import StopReason
from clew.envs import check_image_env
from clew.envs.base import Task
from clew.envs.suites import task_of
from clew.envs.visgym import VisGymEnv, VisGymMaze, make_visgym
from clew.envs.visgym import pool as pools
from clew.envs.visgym.answers import find_action
from clew.envs.visgym.fork import VARIABLE, find_fork
from clew.envs.visgym.pool import ChildGone, ChildLost
from clew.errors import UserError
from clew.evaluation.evaluate import reference
from clew.evaluation.suites import RecipeSuites
from clew.recipe import load_recipe
from clew.rollout.engine import Sampling
from clew.rollout.episodes import Limits, Player, play

TESTS = Path(__file__).parent
STANDIN = str(TESTS / "standin_visgym")
DATA = TESTS / "data" / "visgym"
REAL = os.environ.get(VARIABLE)
RECORDS = json.loads((DATA / "maze_2d.json").read_text())


@pytest.fixture(params=["stand-in", "real"])
def fork(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "real" and not REAL:
        pytest.skip(f"VisGym itself is not here ({VARIABLE} is not set)")
    path = STANDIN if request.param == "stand-in" else str(REAL)
    monkeypatch.setenv(VARIABLE, path)
    return path


def maze(task: str = "maze_2d/easy", **settings: Any) -> VisGymMaze:
    return VisGymMaze(task, **{"path": STANDIN, **settings})


# --- mazes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["easy", "hard"])
def test_mazes_are_the_recorded_ones(fork: str, level: str) -> None:
    env = make_visgym(f"visgym:maze_2d/{level}", path=fork)
    hashes = set()
    for record in RECORDS[level]:
        observation, info = env.reset(record["seed"])
        assert hashlib.sha256(observation.image.tobytes()).hexdigest() == record["frame_sha256"]
        assert list(observation.image.shape) == record["frame_shape"] and observation.text == ""
        assert info["path_length"] == record["shortest_moves"]
        assert env.cell == tuple(record["agent"])  # type: ignore[attr-defined]
        hashes.add(info["content_hash"])
        env.step(env.oracle_action())  # what was drawn meanwhile must not show in the next episode
    assert len(hashes) == len({(*r["map"], *r["agent"], *r["target"]) for r in RECORDS[level]})
    env.close()


@pytest.mark.parametrize("name", ["easy_seed0", "easy_seed1", "hard_seed0"])
def test_frames_are_the_recorded_pictures(fork: str, name: str) -> None:
    level, _, seed = name.partition("_seed")
    env = make_visgym(f"visgym:maze_2d/{level}", path=fork)
    picture = np.asarray(Image.open(DATA / f"{name}.png").convert("RGB"))
    assert np.array_equal(env.reset(int(seed))[0].image, picture)
    env.close()


def test_the_oracle_solves_exactly_what_fits_into_the_cap(fork: str) -> None:
    """50 of seeds 0-63 within 15 turns (12 moves and a stop), all of them within 20 and 25."""
    for cap, solvable in ((15, 50), (20, 64), (25, 64)):
        suite = "visgym:maze_2d/easy"
        recipe = load_recipe("laptop", [f"environment.max_turns={cap}"])
        found = reference(RecipeSuites(recipe).suite(suite), "oracle", 0)
        assert (found.solved, found.total) == (solvable, 64)
        assert [e["seed"] for e in found.episodes] == list(range(64))
        lengths = {r["seed"]: r["shortest_moves"] for r in RECORDS["easy"]}
        assert all(e["success"] == (lengths[e["seed"]] + 1 <= cap) for e in found.episodes)


def test_it_keeps_the_contract_of_image_environments(fork: str) -> None:
    assert check_image_env(functools.partial(VisGymMaze, "maze_2d/easy", path=fork, max_turns=20)) == []


def test_moves_walls_nonsense_and_stop(fork: str) -> None:
    env = VisGymMaze("maze_2d/easy", path=fork, max_turns=10)
    env.reset(0)  # at the lower left; only the way to the right is open
    start, outcomes = env.cell, []
    for answer in ("('move', 0)", "('move', 3)", "I go right.", "('move', 7)", "<answer>('stop', 'stop')</answer>"):
        before = env.cell
        _, reward, terminated, truncated, info = env.step(answer)
        outcomes.append((info["feedback"], env.cell != before, reward, terminated, truncated, info["success"]))
    assert outcomes == [
        ("moved", True, 0.0, False, False, False),
        ("blocked", False, 0.0, False, False, False),
        ("unparsable", False, 0.0, False, False, False),
        ("refused", False, 0.0, False, False, False),
        ("stopped", False, 0.0, True, False, False),
    ]
    assert env.cell == (start[0], start[1] + 1)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("('move', 0)")
    for spelling in ('("move",0)', "'move', 0", "('move', 0,)"):
        env.reset(0)
        assert env.step(spelling)[-1]["feedback"] == "moved" and env.cell == (start[0], start[1] + 1)
    # What VisGym itself would read as one of the two actions.
    for answer in ("('move', 0) # or ('move', 1)", "('move', 0)" + " " * 190 + "('move', 1)"):
        env.reset(0)
        assert env.step(answer)[-1]["feedback"] == "unparsable" and env.cell == start
    assert env.reset(0)[0].text == "", "what it says after a reset belongs to the last episode"
    env.close()


def test_demonstrations_start_anywhere_near_the_target(fork: str) -> None:
    import random

    env = VisGymMaze("maze_2d/easy", path=fork, max_turns=30)
    rng, seen = random.Random(0), set()
    for _ in range(20):
        env.reset(3)
        observation, info = env.start_within(5, rng)
        assert 1 <= info["path_length"] <= 5
        row, column = (25 * index + 12 for index in env.cell)
        assert observation.image[row, column, 2] > 200 and observation.image[row, column, 0] < 100, "the blue agent"
        seen.add(env.cell)
        for _ in range(info["path_length"]):
            assert env.oracle_action() in [env.move_text(d) for d in env.best_moves()]
            env.step(env.oracle_action())
        assert env.step(env.oracle_action())[-1]["success"]
    assert len(seen) > 3
    env.close()


# --- answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("('move', 0)", "('move', 0)"),
        ('  ("move",0)\n', '("move",0)'),
        ("<answer>('move', 2)</answer>", "('move', 2)"),
        ("I see a wall (grey). <action>('move', 2)</action> Done.", "('move', 2)"),
        ("<answer>\n('place', (1, (2, [3, 4])))\n</answer>", "('place', (1, (2, [3, 4])))"),
        ("""('say', "a :-) or ')' ")""", """('say', "a :-) or ')' ")"""),
        (r"('say', 'it\'s (here')", r"('say', 'it\'s (here')"),
        ("Let's see, that's left: ('move', 2). So ('move', 2)", "('move', 2)"),
        ("I could go ('move', 0), but <answer>('move', 1)</answer>", "('move', 1)"),
        ("('move', 0) or, in other words, (\"move\",0)", "('move', 0)"),
        ("'move', 0", "('move', 0)"),
        ("\"('move', 3)\",", "('move', 3)"),
        ("<action>'move', 0</action>", "('move', 0)"),
        ("('move', 0) or ('move', 1)?", None),
        ("('move', 0) # or ('move', 1)", None),
        ("<answer>('move', 0)</answer><answer>('move', 1)</answer>", None),
        ("<answer>right</answer>", None),
        ("('move', 0", None),
        ("('move', [0)]", None),
        ("move right", None),
        ("(1, 2)", None),
        ("('move', __import__('os'))", None),
        ("", None),
    ],
)
def test_the_action_of_an_answer(answer: str, action: str | None) -> None:
    assert find_action(answer) == action


PAYLOADS = st.recursive(
    st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
PROSE = st.text(alphabet="abc .,!?'\"", max_size=20)


@given(name=st.text(min_size=1, max_size=8), payload=PAYLOADS, tag=st.sampled_from(["", "answer", "action"]))
def test_any_tuple_that_python_writes_is_read_back(name: str, payload: Any, tag: str) -> None:
    text = repr((name, payload))
    assert find_action(f"<{tag}>{text}</{tag}>" if tag and "</" not in text else text) == text


@given(before=PROSE, after=PROSE)
def test_prose_around_an_action_does_not_matter(before: str, after: str) -> None:
    assert find_action(f"{before}('move', 3){after}") == "('move', 3)"


@given(st.text(alphabet="()[]{}'\"\\ a,<>/answer", max_size=80))
def test_nothing_but_actions_is_read(answer: str) -> None:
    found = find_action(answer)
    assert found is None or (found in answer and isinstance(eval(found), tuple))


def test_a_long_answer_is_read_in_no_time() -> None:
    began = time.monotonic()
    for text in ("(" * 100_000, "('a" * 30_000, "('" + "(" * 50_000, "<answer>" * 20_000):
        assert find_action(text) is None
    assert time.monotonic() - began < 20


# --- processes -------------------------------------------------------------------------------------------


def test_gymnasium_itself_stays_what_it_is(fork: str) -> None:
    import gymnasium

    env = VisGymMaze("maze_2d/easy", path=fork)
    assert not hasattr(gymnasium, "VLMEnvMixin")
    env.close()


def test_environments_share_the_pools_processes() -> None:
    envs = [maze(children=2) for _ in range(6)]
    pids = [env._child.process.pid for env in envs]  # type: ignore[union-attr]
    assert len(set(pids)) == 2 and all(pids.count(pid) == 3 for pid in set(pids))
    for seed, env in enumerate(envs):
        env.reset(seed)
    for env in envs:
        env.step(env.oracle_action())
    assert [env.reset(seed)[1]["path_length"] for seed, env in enumerate(envs)] == [
        r["shortest_moves"] for r in RECORDS["easy"][:6]
    ]
    for env in envs:
        env.close()


def test_what_an_environment_prints_does_no_harm() -> None:
    env = maze("maze_2d/chats")
    env.reset(0)
    assert env.step("('move', 0)")[1:4] == (0.0, False, False)
    env.close()


def test_feedback_can_not_speak_the_chat_templates_language() -> None:
    env = maze("maze_2d/echoes")
    env.reset(0)
    text = env.step("('move', 0)")[0].text
    assert "<|" not in text and "|>" not in text and "im_end" in text
    env.close()


def test_an_answer_that_makes_visgym_raise_costs_the_agent_its_turn() -> None:
    """It is what the agent wrote (a number without end), not infrastructure: no replay, no other reward."""
    env = maze("maze_2d/raises", max_turns=2)
    env.reset(0)
    observation, reward, terminated, truncated, info = env.step("('move', 0)")
    assert "ZeroDivisionError: as asked" in observation.text
    assert (reward, terminated, truncated, info["feedback"]) == (0.0, False, False, "refused")
    assert env.step("('move', 0)")[3] and env.reset(0)[1]["path_length"] == 12
    env.close()


def test_huge_numbers_are_the_agents_own_failure(fork: str) -> None:
    env = VisGymMaze("maze_2d/easy", path=fork, max_turns=5)
    env.reset(0)
    assert env.step(f"('move', {10**30})")[-1]["feedback"] == "refused"
    assert env.step("('move', 0)")[-1]["feedback"] == "moved"
    env.close()


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    env = maze("maze_2d/hangs", children=3)  # a pool of its own
    env.reset(0)
    child = env._child
    assert child is not None
    child.reply_timeout_s = 1.0
    with pytest.raises(ChildLost, match="did not answer in time"):
        env.step("('move', 0)")
    assert not child.alive
    env.close()


def test_a_dead_process_is_replaced() -> None:
    first, second = maze(children=1), maze(children=1)
    for env in (first, second):
        env.reset(0)
    child = first._child
    assert child is not None and second._child is child
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()
    for env in (first, second):
        with pytest.raises((ChildLost, ChildGone)):
            env.step("('move', 0)")
    # What only wants to know tasks (the stream of a run) goes on by itself.
    assert first.reset(1)[1]["path_length"] == 16 and first._child is not child
    second.close()
    third = maze(children=1)
    assert third._child is first._child and third._child is not None and third._child.load == 2
    first.close()
    third.close()
    assert third._pool.take().load == 1, "places are given back"


def test_an_interrupted_request_leaves_no_reply_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    env = maze(children=1)
    child = env._child
    assert child is not None

    def interrupted(until: float) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(child, "_receive", interrupted)
        env.reset(0)
    assert not child.alive
    env.close()


def test_environments_left_behind_at_the_deadline_are_closed() -> None:
    """Calls that come back after their episode was given up: nobody waits for them, and their places are free again."""
    task = Task("visgym:maze_2d/slow", 0, task_of(maze(), 0).content_hash)
    vlm = tiny.tiny()
    engine = tiny.ScriptedEngine(vlm, lambda trajectory: "('move', 0)")
    make = functools.partial(maze, "maze_2d/slow", children=4)  # a pool of its own
    attempts = [(task, sample) for sample in range(6)]
    player, sampling = Player(vlm.template, vlm.patcher), Sampling(1.0, 64)
    trajectories = play(engine, player, make, attempts, sampling, Limits(4000, deadline_s=4.0), ("t",))
    assert {t.stop_reason for t in trajectories} == {StopReason.DEADLINE}
    pool = pools.pool((*pools.CHILD, str(Path(STANDIN).resolve())), 4)
    until = time.monotonic() + 60
    while any(child.load for child in pool._children):
        assert time.monotonic() < until, "environments are still held"
        time.sleep(0.2)


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import os, signal; from clew.envs.visgym import VisGymMaze\n"
        f"env = VisGymMaze('maze_2d/easy', path={STANDIN!r})\n"
        "print(env._child.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout)
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]:
        assert time.monotonic() < until, "the child outlived its parent"
        time.sleep(0.1)


def played(task: str, seeds: list[int], answers: str) -> list[Any]:
    """Episodes that the rollout loop plays in the stand-in with an agent that always gives the same answer."""
    vlm = tiny.tiny()
    env = maze()
    hashes = {seed: task_of(env, seed).content_hash for seed in seeds}
    env.close()

    tasks = [(Task(f"visgym:{task}", seed, hashes[seed]), 0) for seed in seeds]
    assert len({task.content_hash for task, _ in tasks}) == len(tasks)
    make = functools.partial(maze, task, max_turns=3)
    engine = tiny.ScriptedEngine(vlm, lambda trajectory: answers)
    return play(engine, Player(vlm.template, vlm.patcher), make, tasks, Sampling(1.0, 64), Limits(4000), ("t",))


def test_a_process_that_dies_costs_its_own_episodes_only() -> None:
    """Played again in a new process, then typed as crashed; the others go on."""
    trajectories = played("maze_2d/dies-at-seed-one", [0, 1, 2], "('move', 0)")
    assert [t.stop_reason for t in trajectories] == [
        StopReason.TURN_CAP,
        StopReason.ENV_CRASHED,
        StopReason.TURN_CAP,
    ]
    assert [t.turns[0].action for t in trajectories if t.turns] == ["('move', 0)"] * 2


def test_neighbours_of_a_deadly_task_are_played() -> None:
    """It dies in the middle of an episode, with many others in the same process, each time that it is played."""
    trajectories = played("maze_2d/step-dies-at-seed-one", list(range(16)), "('move', 0)")
    reasons = [t.stop_reason for t in trajectories]
    assert reasons == [StopReason.TURN_CAP, StopReason.ENV_CRASHED, *[StopReason.TURN_CAP] * 14]
    assert all(len(t.turns) == 3 for t in trajectories if t.stop_reason == StopReason.TURN_CAP)


# --- what is said when something is missing --------------------------------------------------------------


def test_the_fork_must_be_named_and_be_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match=r"CLEW_VISGYM is not set.*clone VisGym"):
        find_fork()
    with pytest.raises(UserError, match=r"runtime\.visgym_path: .* holds no gymnasium/core\.py"):
        find_fork(str(tmp_path))
    (tmp_path / "gymnasium").mkdir()
    (tmp_path / "gymnasium" / "core.py").write_text("class Env: pass\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"CLEW_VISGYM: .* is a Gymnasium that is not VisGym's fork"):
        find_fork()
    (tmp_path / "gymnasium" / "core.py").write_text("class VLMEnvMixin: pass\n")
    (tmp_path / "gymnasium" / "__init__.py").write_text("import nothing_of_the_kind\n")
    with pytest.raises(UserError, match=r"nothing_of_the_kind"):
        VisGymEnv("maze_2d/easy")
    monkeypatch.setenv(VARIABLE, STANDIN)
    with pytest.raises(UserError, match=r"VisGym can't make 'jigsaw/easy' \(ValueError: no such id: jigsaw/easy\)"):
        VisGymEnv("jigsaw/easy")
    assert find_fork() == Path(STANDIN)


@pytest.mark.skipif(not REAL, reason=f"VisGym itself is not here ({VARIABLE} is not set)")
@pytest.mark.parametrize(
    "task", ["matchstick_equation", "matchstick_rotation", "patch_reassembly", "sliding_block", "maze_3d"]
)
def test_the_oracle_solves_the_other_tasks(task: str) -> None:
    from clew.envs.visgym.fork import missing_packages

    if missing := missing_packages(task):
        pytest.skip(f"{task} needs {', '.join(missing)}")
    env = make_visgym(f"visgym:{task}/easy", path=REAL, max_turns=60)
    for seed in range(3):
        env.reset(seed)
        over = False
        while not over:
            *_, terminated, truncated, info = env.step(env.oracle_action())
            over = terminated or truncated
        assert info["success"]
    env.close()
