"""The rules of the game: answers, moves, feedback, ends, settings."""

from __future__ import annotations

import random
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_envs_maze import graph_of

from clew.envs.base import ImageEnv
from clew.envs.maze import DIRECTIONS, PALETTES, Maze
from clew.envs.maze_env import ACTIONS, FEEDBACK, MazeEnv, answer_text, parse_action
from clew.envs.registry import make_env
from clew.errors import UserError

# 0 - 1 - 2    the start is 0, the goal 2; room 4 hangs below 1, 3 and 5 are dead ends beside 4
#     |
# 3 - 4 - 5
TEE = Maze(2, 3, (0b0010, 0b1110, 0b1000, 0b0010, 0b1011, 0b1000), start=0, goal=2, path_length=2)


def env_on_tee(**kwargs: Any) -> MazeEnv:
    env = MazeEnv(size=(2, 3), min_path=1, max_path=3, **{"max_turns": 6, **kwargs})
    env.start(TEE)
    return env


def play(env: MazeEnv, *actions: str) -> list[tuple[str, int, float, bool, bool, bool]]:
    """(feedback, room, reward, success, terminated, truncated) after each action."""
    record = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(answer_text(action))
        assert observation.text == FEEDBACK[info["feedback"]]
        record.append((info["feedback"], env.room, reward, info["success"], terminated, truncated))
    return record


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("<action>up</action>", "up"),
        ("<action> left\n</action>", "left"),
        ("I see a wall, so <action>down</action>.", "down"),
        ("<action><action>right</action>", "right"),
        ("<action>stop</action><|im_end|>", "stop"),
        ("up", None),
        ("", None),
        ("<action></action>", None),
        ("<action>Up</action>", None),
        ("<action>north</action>", None),
        ("<action>up", None),
        ("up</action>", None),
        ("<ACTION>up</ACTION>", None),
        ("<action>up down</action>", None),
        ("<action>up|down|left|right|stop</action>", None),
        ("<action>up</action><action>up</action>", None),
        ("<action>up</action><action>fly away</action>", None),
        ("<action>üp</action>", None),
        ("<action>" * 50_000, None),
        ("<action>" + " " * 100_000 + "up", None),
    ],
)
def test_parse_action(answer: str, action: str | None) -> None:
    assert parse_action(answer) == action


@given(st.text())
def test_no_text_breaks_the_parser(answer: str) -> None:
    assert parse_action(answer) in (None, *ACTIONS)
    assert parse_action(f"<action>{answer}</action>") in (None, *ACTIONS)


def test_reach_ends_on_entering_the_goal() -> None:
    assert play(env_on_tee(), "up", "right", "down", "up", "right") == [
        ("blocked", 0, 0.0, False, False, False),
        ("moved", 1, 0.0, False, False, False),
        ("moved", 4, 0.0, False, False, False),
        ("moved", 1, 0.0, False, False, False),
        ("reached", 2, 1.0, True, True, False),
    ]


def test_stop_is_idle_under_reach() -> None:
    assert play(env_on_tee(), "stop", "right", "stop", "right") == [
        ("idle", 0, 0.0, False, False, False),
        ("moved", 1, 0.0, False, False, False),
        ("idle", 1, 0.0, False, False, False),
        ("reached", 2, 1.0, True, True, False),
    ]


def test_under_stop_only_stopping_on_the_goal_succeeds() -> None:
    assert play(env_on_tee(goal="stop"), "right", "right", "left", "right", "stop") == [
        ("moved", 1, 0.0, False, False, False),
        ("moved", 2, 0.0, False, False, False),
        ("moved", 1, 0.0, False, False, False),
        ("moved", 2, 0.0, False, False, False),
        ("reached", 2, 1.0, True, True, False),
    ]
    assert play(env_on_tee(goal="stop"), "right", "stop")[-1] == ("stopped", 1, 0.0, False, True, False)


@pytest.mark.parametrize("goal", ["reach", "stop"])
def test_the_cap_truncates_and_garbage_counts(goal: str) -> None:
    env = env_on_tee(goal=goal)
    for turn in range(1, 7):
        _observation, reward, terminated, truncated, info = env.step("🧶" if turn % 2 else answer_text("left"))
        action = None if turn % 2 else "left"
        assert info == {"success": False, "feedback": "blocked" if action else "unparsable", "action": action}
        assert (reward, terminated, truncated) == (0.0, False, turn == 6)
    with pytest.raises(RuntimeError, match="over"):
        env.step(answer_text("right"))


def test_success_on_the_last_turn_is_success() -> None:
    assert play(env_on_tee(max_turns=3), "left", "right", "right")[-1] == (
        "reached",
        2,
        1.0,
        True,
        True,
        False,
    )


def test_nothing_can_be_done_before_reset() -> None:
    env = MazeEnv()
    for call in (lambda: env.step(answer_text("up")), env.frame, env.oracle_action, env.distance_to_goal):
        with pytest.raises(RuntimeError, match=r"call reset\(seed\) first"):
            call()


@given(
    st.integers(0, 2**40),
    st.sampled_from(["reach", "stop"]),
    st.lists(st.sampled_from((*ACTIONS, "x")), min_size=9),
)
@settings(max_examples=60, deadline=None)
def test_the_game_is_a_walk_on_the_graph(seed: int, goal: str, actions: list[str]) -> None:
    env = MazeEnv(size=(3, 4), min_path=1, max_path=6, max_turns=9, goal=goal, braid=0.5)
    _, info = env.reset(seed)
    maze = env.maze
    assert maze is not None and info == {"content_hash": maze.content_hash, "path_length": maze.path_length}
    graph = graph_of(3, 4, maze.open_sides)
    shift = dict(zip(DIRECTIONS, (-4, 1, 4, -1), strict=True))
    room = maze.start
    for turn, action in enumerate(actions, 1):
        _observation, reward, terminated, truncated, info = env.step(answer_text(action))
        moved = action in shift and graph.has_edge(room, room + shift[action])
        # has_edge(3, 4) can't be mistaken for "right" across a row end: such rooms are never joined
        room += shift[action] if moved else 0
        assert env.room == room
        success = room == maze.goal and (moved if goal == "reach" else action == "stop")
        assert info["success"] is success and reward == float(success)
        assert terminated is (success or (goal == "stop" and action == "stop"))
        assert truncated is (not terminated and turn == 9)
        word = "unparsable" if action == "x" else "moved" if moved else "blocked"
        if action == "stop":
            word = "stopped" if goal == "stop" else "idle"
        assert info["feedback"] == ("reached" if success else word)
        if terminated or truncated:
            break
        if room != maze.goal:
            closer = [
                name
                for name, step in shift.items()
                if graph.has_edge(room, room + step)
                and nx.shortest_path_length(graph, room + step, maze.goal)
                < nx.shortest_path_length(graph, room, maze.goal)
            ]
            assert [ACTIONS[d] for d in env.best_moves()] == closer
            assert env.oracle_action() == answer_text(closer[0])


def test_colours_are_not_content() -> None:
    frames, hashes = set(), set()
    for palette in PALETTES:
        observation, info = MazeEnv(palette=palette).reset(5)
        frames.add(observation.image.tobytes())
        hashes.add(info["content_hash"])
    assert len(frames) == len(PALETTES) and len(hashes) == 1


def test_frames_of_an_episode_are_kept_apart() -> None:
    env = env_on_tee()
    first = env.frame()
    copy = first.copy()
    second = env.step(answer_text("right"))[0].image
    assert np.array_equal(first, copy) and not np.array_equal(first, second)
    assert second.shape == first.shape == (32, 48, 3)


def test_global_random_numbers_play_no_part() -> None:
    random.seed(1)
    one = MazeEnv(braid=0.5).reset(3)[1]
    random.seed(2)
    state = random.getstate()
    assert MazeEnv(braid=0.5).reset(3)[1] == one
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"palette": "pink"}, "palette 'pink' is unknown; there are day, dusk, night"),
        ({"goal": "win"}, "goal 'win' is unknown; there are reach, stop"),
        ({"size": (1, 6)}, r"size \(1, 6\) is impossible"),
        ({"size": (6, 6, 6)}, "give rows and columns"),
        ({"size": (6, 256)}, "from 2 to 255"),
        ({"min_path": 0}, "no maze has"),
        ({"min_path": 13}, "no maze has"),
        ({"size": (2, 3), "min_path": 6}, "no maze has size"),
        ({"braid": 1.5}, "braid 1.5"),
        ({"max_path": 16}, "can't be walked within 15 turns"),
        ({"max_path": 15, "goal": "stop"}, "can't be walked within 15 turns"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MazeEnv(**wrong)
    with pytest.raises(UserError, match=message):  # what the command line shows
        make_env("clew/Maze-v0", **wrong)


def test_the_registry_knows_the_maze_and_says_so() -> None:
    env = make_env("clew/Maze-v0", size=(4, 4), min_path=3, max_path=8)
    assert isinstance(env, MazeEnv) and isinstance(env, ImageEnv)
    with pytest.raises(UserError, match=r"environment\.id: 'clew/Maze-v1' is unknown; there are clew/Maze-v0"):
        make_env("clew/Maze-v1")
