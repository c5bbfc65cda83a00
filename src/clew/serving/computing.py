"""The one thread that computes: rounds of all engines in turn, with small pieces of other work between them.

A second computing thread would slow both down many times over: each brings its own pool of helpers onto the same cores.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

from clew.rollout.continuous import Answer, ContinuousEngine

log = logging.getLogger(__name__)
_PIECES_S = 0.01  # of other work between two rounds


class Computing:
    """Runs engines on a thread of its own. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[ContinuousEngine, list[Answer]] = {}  # guarded by the condition; so are the works
        self._works: list[tuple[Iterator[None], Future[None]]] = []
        self._engines: list[ContinuousEngine] = []  # with answers in progress; the computing thread's own
        self._thread = threading.Thread(target=self._run, name="computing", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def ask(self, engine: ContinuousEngine, answer: Answer) -> None:
        """Has an engine answer; ``answer.on_token`` is called as it goes on."""
        with self._changed:
            self._waiting.setdefault(engine, []).append(answer)
            self._changed.notify()

    def work(self, pieces: Iterator[None]) -> Future[None]:
        """Has an iterator exhausted between rounds; the future holds what it raises."""
        future: Future[None] = Future()
        with self._changed:
            self._works.append((pieces, future))
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            self._turn()  # a call of its own, so that no variable keeps an engine alive while there is nothing to do

    def _turn(self) -> None:
        with self._changed:
            while not (self._waiting or self._works or self._engines):
                self._changed.wait()
            engines = list(dict.fromkeys([*self._engines, *self._waiting]))
        for engine in engines:
            self._round(engine)
            self._advance_work()
        self._engines = [engine for engine in engines if engine.busy]
        for engine in engines:
            if not engine.busy:
                engine.release()  # the keys and values of its last answers
        if not engines:
            self._advance_work()

    def _round(self, engine: ContinuousEngine) -> None:
        with self._changed:
            waiting = self._waiting.pop(engine, [])
        taken = list(waiting)
        try:
            engine.round(waiting)
        except Exception as error:
            log.exception("a round of %s failed; its answers are lost", engine.version)
            for answer in engine.give_up(taken):
                answer.failed = type(error).__name__
                answer.on_token(answer)
            return
        if waiting := [answer for answer in waiting if answer.living]:
            with self._changed:
                self._waiting[engine] = waiting + self._waiting.get(engine, [])

    def _advance_work(self) -> None:
        until = time.monotonic() + _PIECES_S
        while time.monotonic() < until:
            with self._changed:
                if not self._works:
                    return
                pieces, future = self._works[0]
            if future.running() or future.set_running_or_notify_cancel():
                try:
                    next(pieces)
                    continue
                except StopIteration:
                    future.set_result(None)
                except Exception as error:
                    future.set_exception(error)
            with self._changed:
                self._works.pop(0)
