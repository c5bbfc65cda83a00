"""Which episodes are still to be played: a queue that an engine draws from as its places become free."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from clew.envs.base import Task


class Attempt(NamedTuple):
    """One episode to be played.

    Attributes:
        place: in the caller's list.
        task: what is played.
        sample: which attempt at the task this is.
    """

    place: int
    task: Task
    sample: int


class Feed:
    """Attempts that may still be added to while they are played. Safe between threads.

    Args:
        attempts: the first ones.
        closed: there will be no more.
    """

    def __init__(self, attempts: Iterable[Attempt] = (), *, closed: bool = False) -> None:
        self._waiting = deque(attempts)
        self._closed = closed
        self._changed = threading.Condition()

    def add(self, attempts: Iterable[Attempt]) -> None:
        """Adds attempts."""
        with self._changed:
            self._waiting.extend(attempts)
            self._changed.notify_all()

    def has_more(self) -> bool:
        """Whether attempts are waiting."""
        with self._changed:
            return bool(self._waiting)

    def close(self) -> None:
        """Says that no more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, room: int, *, wait: bool) -> list[Attempt]:
        """Up to ``room`` attempts; with ``wait``, blocks until there is one, and an empty list means the end."""
        with self._changed:
            while wait and not self._waiting and not self._closed:
                self._changed.wait()
            return [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
