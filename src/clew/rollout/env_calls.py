"""Calls into environments on threads of their own, so that one that hangs holds up nothing but its own episode."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_HELP_AFTER_S = 0.05


class EnvCalls(Generic[K]):
    """Runs functions on daemon threads and hands back what they return or raise.

    One thread serves all as long as calls are quick; more are started when calls queue up and none comes back. A
    thread that never comes back is left behind: it can't be killed, and being a daemon it doesn't hold the process.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[K, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[K, Any, Exception | None]] = queue.SimpleQueue()
        self._began: dict[K, float] = {}
        self._quiet_since = 0.0  # nothing has come back since
        self._threads = 0

    def start(self, key: K, call: Callable[[], Any]) -> None:
        """Starts a call; ``key`` comes back with its outcome and must not be in use by another one."""
        if not self._threads:
            self._add_thread()
        now = time.monotonic()
        if not self._began:
            self._quiet_since = now
        self._began[key] = now
        self._jobs.put((key, call))

    def running(self, key: K) -> bool:
        """Whether a call has not come back yet."""
        return key in self._began

    def wait(
        self, patience_s: float, *, until: float, at_least_one: bool, unless: Callable[[], bool] = lambda: False
    ) -> list[tuple[K, Any, Exception | None]]:
        """Outcomes (key, value, exception) of the calls that are done.

        Args:
            patience_s: seconds for which all wait for one call. Past it the others go on, and its outcome comes later.
            until: moment (``time.monotonic``) at which waiting ends in any case.
            at_least_one: there is nothing else to do: wait past the patience for a first outcome ...
            unless: ... until this says that there is something else; it is asked several times a second.
        """
        found: list[tuple[K, Any, Exception | None]] = []
        while self._began:
            limit = min(until, max(self._began.values()) + patience_s)  # the call begun last is waited for longest
            if at_least_one and not found:
                limit = until
            try:
                key, value, error = self._done.get(timeout=max(min(limit - time.monotonic(), _HELP_AFTER_S), 0.0))
            except queue.Empty:
                now = time.monotonic()
                behind = not self._jobs.empty() and now - self._quiet_since >= _HELP_AFTER_S
                if behind and self._threads < len(self._began):
                    self._add_thread()
                    self._quiet_since = now
                if now >= limit or (at_least_one and not found and unless()):
                    break
                continue
            self._quiet_since = time.monotonic()
            del self._began[key]
            found.append((key, value, error))
        return found

    def close(self) -> None:
        """Ends the threads that are not stuck."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _add_thread(self) -> None:
        self._threads += 1
        threading.Thread(target=self._serve, daemon=True, name=f"env-calls-{self._threads}").start()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            key, call = job
            try:
                self._done.put((key, call(), None))
            except Exception as error:  # handed to the caller, who types it
                self._done.put((key, None, error))
