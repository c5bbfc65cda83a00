"""Walkers without a model: the oracle, the blind references, and the fallible demonstrator of SFT."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from clew.envs.base import ImageEnv, Observation

Navigator = Callable[[ImageEnv, random.Random], str]


@runtime_checkable
class Walk(Protocol):
    """An environment walked in four directions, numbered so that 0 and 2, 1 and 3 are opposite."""

    turn: int
    stop_text: str  # how stopping is written

    def exits(self) -> list[int]:
        """The open directions."""
        ...

    def best_moves(self) -> list[int]:
        """The directions that lead nearer to the goal; none on it."""
        ...

    def move_text(self, direction: int) -> str:
        """How a move is written."""
        ...

    def start_within(self, farthest: int, rng: random.Random) -> tuple[Observation, dict[str, Any]]:
        """Starts the current task again from a random place at most ``farthest`` moves from the goal."""
        ...


@runtime_checkable
class Choices(Protocol):
    """An environment whose answers can be listed."""

    answer_texts: tuple[str, ...]  # every action as it is written


def oracle(env: ImageEnv, rng: random.Random) -> str:
    """Always plays a shortest path."""
    return env.oracle_action()


def uniform(env: ImageEnv, rng: random.Random) -> str:
    """Plays one of the four moves at random, walls or not; where nobody walks, any action."""
    if isinstance(env, Choices):
        return rng.choice(env.answer_texts)
    assert isinstance(env, Walk)
    return env.move_text(rng.choice(range(4)))


class NoTurnBack:
    """Random among the open sides, never back to where it came from unless in a dead end.

    It sees the walls around it and nothing else: what a policy reaches that has local sight and no plan.
    """

    def __init__(self) -> None:
        self._came_from: int | None = None

    def __call__(self, env: ImageEnv, rng: random.Random) -> str:
        assert isinstance(env, Walk)
        if not env.best_moves():
            return env.stop_text
        exits = env.exits()
        if env.turn == 0:
            self._came_from = None
        onward = [d for d in exits if d != self._came_from] or exits
        direction = rng.choice(onward)
        self._came_from = direction ^ 2
        return env.move_text(direction)


def fallible(random_moves: float) -> Navigator:
    """A navigator that errs in ``random_moves`` of its turns and plays a best action otherwise.

    Where it walks it errs by taking a random open side, elsewhere by playing any action.
    """

    def navigate(env: ImageEnv, rng: random.Random) -> str:
        if not isinstance(env, Walk):
            return uniform(env, rng) if rng.random() < random_moves else env.oracle_action()
        best = env.best_moves()
        if best and rng.random() < random_moves:
            return env.move_text(rng.choice(env.exits()))
        return env.move_text(rng.choice(best)) if best else env.stop_text

    return navigate


REFERENCES: dict[str, Callable[[], Navigator]] = {
    "random": lambda: uniform,
    "no-turn-back": NoTurnBack,
    "oracle": lambda: oracle,
}


def missing_reference(env: ImageEnv, policy: str) -> str | None:
    """Why a reference policy can't play an environment (of which a task was started), or None if it can."""
    if policy == "no-turn-back" and not isinstance(env, Walk):
        return f"{env.env_id} is not walked in four directions"
    if policy == "random" and not isinstance(env, Walk | Choices):
        return f"the actions of {env.env_id} can't be listed"
    if policy == "oracle":
        try:
            env.oracle_action()
        except NotImplementedError:
            return f"{env.env_id} does not know its own solution"
    return None
