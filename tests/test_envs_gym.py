"""The Gymnasium face, and that environments need no torch."""

from __future__ import annotations

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.error import InvalidAction
from gymnasium.utils.env_checker import check_env

import clew.envs
from clew.envs.maze_env import MazeEnv


@pytest.mark.parametrize("settings", [{}, {"size": (3, 5), "max_path": 9, "goal": "stop", "palette": "night"}])
def test_check_env_has_nothing_to_say(settings: dict) -> None:
    env = gymnasium.make("clew/Maze-v0", render_mode="rgb_array", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


def test_it_is_the_same_maze_as_the_text_environment() -> None:
    env = gymnasium.make("clew/Maze-v0", render_mode="rgb_array", size=(3, 4), min_path=2, max_path=6, max_turns=8)
    text_env = MazeEnv(size=(3, 4), min_path=2, max_path=6, max_turns=8)
    for seed in range(5):
        image, info = env.reset(seed=seed)
        observation, text_info = text_env.reset(seed)
        assert np.array_equal(image, observation.image) and info == {**text_info, "text": ""}
        over = False
        while not over:
            action = text_env.best_moves()[0]
            observation, *expected, text_info = text_env.step(text_env.oracle_action())
            image, *rest, info = env.step(action)
            assert np.array_equal(image, observation.image)
            assert np.array_equal(env.render(), image)
            assert rest == expected and info == {**text_info, "text": observation.text}
            over = rest[1] or rest[2]
        assert info["success"] and rest[0] == 1.0


def test_without_a_seed_mazes_differ_but_follow_from_the_first() -> None:
    def contents() -> list[str]:
        env = gymnasium.make("clew/Maze-v0")
        return [env.reset(seed=11)[1]["content_hash"]] + [env.reset()[1]["content_hash"] for _ in range(5)]

    assert contents() == contents()
    assert len(set(contents())) == 6


def test_it_owns_its_turn_cap() -> None:
    env = gymnasium.make("clew/Maze-v0", max_turns=13)
    assert env.spec is not None and env.spec.max_episode_steps is None
    env.reset(seed=0)
    ends = [env.step(4)[3] for _ in range(13)]  # "stop" does nothing where reaching is the goal
    assert ends == [False] * 12 + [True]


@pytest.mark.parametrize("action", [-1, 5, 2.0, "up"])
def test_unknown_actions_are_refused(action: object) -> None:
    env = clew.envs.MazeGymEnv()
    env.reset(seed=0)
    with pytest.raises(InvalidAction, match="there are 0 up, 1 right, 2 down, 3 left, 4 stop"):
        env.step(action)  # type: ignore[arg-type]


def test_unknown_render_modes_are_refused_and_none_draws_nothing() -> None:
    with pytest.raises(ValueError, match="there is rgb_array"):
        clew.envs.MazeGymEnv(render_mode="human")
    env = clew.envs.MazeGymEnv()
    env.reset(seed=0)
    assert env.render() is None


def test_vector_environments_work() -> None:
    envs = gymnasium.make_vec(
        "clew/Maze-v0", num_envs=3, vectorization_mode="sync", size=(3, 3), min_path=2, max_path=4
    )
    images, _ = envs.reset(seed=5)
    assert images.shape == (3, 48, 48, 3)
    for _ in range(20):  # over ends and automatic resets
        images, rewards, *_ = envs.step(envs.action_space.sample())
        assert images.shape == (3, 48, 48, 3) and rewards.shape == (3,)
    envs.close()


def test_environments_need_no_torch() -> None:
    script = (
        "import sys, clew.envs, gymnasium; gymnasium.make('clew/Maze-v0').reset(seed=0); "
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'ray'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_exports_what_it_says() -> None:
    for name in clew.envs.__all__:
        assert getattr(clew.envs, name) is not None
