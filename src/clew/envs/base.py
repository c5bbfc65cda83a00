"""The contract every environment keeps: one task is one picture puzzle, played by text actions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np


class EnvironmentGone(RuntimeError):
    """An environment is gone through no fault of its episode, which is played again as if nothing had been."""


@dataclass(frozen=True)
class Observation:
    """What the agent is shown at one turn.

    Attributes:
        image: uint8 RGB frame, shape [height, width, 3].
        text: feedback on the last action (``""`` for the first turn).
    """

    image: np.ndarray
    text: str


@dataclass(frozen=True)
class Task:
    """What identifies one problem: environment id + seed, with a hash of its content.

    Two seeds may give the same problem (small mazes collide), so disjointness of sets and the
    identity of a group are decided by ``content_hash``, never by the seed alone.
    """

    env_id: str
    seed: int
    content_hash: str


@runtime_checkable
class ImageEnv(Protocol):
    """An environment seen as images and driven by text.

    The environment owns its turn cap: it answers ``truncated=True`` when the cap is reached. ``info`` of
    ``step`` holds ``success`` (bool; the goal was reached, independent of any reward), ``feedback``
    (one short word: moved, blocked, unparsable, ...) and, if it likes, ``action`` (str or None: the action that
    was understood, as reports show it).
    """

    env_id: str
    prompt: str  # instructions, shown once, before the first observation
    action_names: tuple[str, ...]
    max_turns: int

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Starts the task of this seed; ``info`` holds ``content_hash`` and ``path_length``."""
        ...

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Plays the agent's answer (its full text): observation, reward, terminated, truncated, info."""
        ...

    def oracle_action(self) -> str:
        """The text of one optimal action from the current state; raises NotImplementedError if unknown."""
        ...

    def close(self) -> None: ...


def plain_text(text: str) -> str:
    """Foreign text that can't be taken for a chat template's own tokens: ``<|im_end|>`` becomes ``< |im_end| >``."""
    return text.replace("<|", "< |").replace("|>", "| >")


@dataclass(frozen=True)
class Suite:
    """A fixed, named list of tasks with the settings they are played under.

    Attributes:
        name: as used in recipes and file names (``heldout``, ``larger``, ...).
        env_id: the environment.
        env_kwargs: keyword arguments for ``make_env``, the turn cap included.
        tasks: the tasks in order.
    """

    name: str
    env_id: str
    env_kwargs: dict[str, Any] = field(hash=False)
    tasks: tuple[Task, ...] = ()
