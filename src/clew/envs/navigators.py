"""Walkers without a model: the oracle, the blind references, and the fallible demonstrator of SFT."""

from __future__ import annotations

import random
from collections.abc import Callable

from clew.envs.maze import DIRECTIONS
from clew.envs.maze_env import MazeEnv, answer_text

Navigator = Callable[[MazeEnv, random.Random], str]


def oracle(env: MazeEnv, rng: random.Random) -> str:
    """Always plays a shortest path."""
    return env.oracle_action()


def uniform(env: MazeEnv, rng: random.Random) -> str:
    """Plays one of the four moves at random, walls or not."""
    return answer_text(rng.choice(DIRECTIONS))


class NoTurnBack:
    """Random among the open sides, never back to where it came from unless in a dead end.

    It sees the walls around it and nothing else: what a policy reaches that has local sight and no plan.
    """

    def __init__(self) -> None:
        self._came_from: int | None = None

    def __call__(self, env: MazeEnv, rng: random.Random) -> str:
        assert env.maze is not None
        if env.room == env.maze.goal:
            return answer_text("stop")
        exits = env.maze.exits(env.room)
        if env.turn == 0:
            self._came_from = None
        onward = [d for d in exits if d != self._came_from] or exits
        direction = rng.choice(onward)
        self._came_from = direction ^ 2
        return answer_text(DIRECTIONS[direction])


def fallible(random_moves: float) -> Navigator:
    """A navigator that takes a random open side in ``random_moves`` of its turns and a best one otherwise."""

    def navigate(env: MazeEnv, rng: random.Random) -> str:
        assert env.maze is not None
        if env.room != env.maze.goal and rng.random() < random_moves:
            return answer_text(DIRECTIONS[rng.choice(env.maze.exits(env.room))])
        return answer_text(rng.choice(env.best_actions()))

    return navigate


REFERENCES: dict[str, Callable[[], Navigator]] = {
    "random": lambda: uniform,
    "no-turn-back": NoTurnBack,
    "oracle": lambda: oracle,
}
