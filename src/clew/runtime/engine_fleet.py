"""All engines of a Ray run: every episode is played by one of them, also when some die on the way."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from clew.agent.ledger import StopReason, Trajectory
from clew.envs.base import Task
from clew.errors import RunFailed, UserError
from clew.policy.adapter import Adapter, StoredAdapter
from clew.rollout.engine import Sampling
from clew.rollout.episodes import FrameFilter, Limits, MakeEnv, Player
from clew.rollout.feed import Attempt
from clew.runtime.devices import Whereabouts
from clew.runtime.engine_workers import Job
from clew.runtime.ray_errors import cause_of, describe

TRIES = 2  # of an episode beside others; when its engine died each time, it is played alone, and then it is lost
_DEATHS = 3  # of engines in one place with no episode ended in between; one more ends the run
_FAULTS = 1  # the same of engines that raise something: the next will probably raise it too
_SILENCE_S = 60.0  # what an engine may take beyond the deadline before it is taken for dead
_START_S = 1800.0  # what it may take to start


@dataclass
class _Engine:
    """One engine's place in the fleet.

    Attributes:
        actor: who holds the place now; a dead one is replaced.
        outstanding: the attempts it is playing, by their place in the batch.
        stream: what it has played comes from here; None while it is not playing.
        ready: answers when a new actor has loaded model and version; None when it has.
        where: the actor runs.
        deaths: in this place since the last episode that ended there.
        alone: whether what it is playing is suspected of killing engines, and so gets no company.
        due: moment (``time.monotonic``) by which something must come of what it was given.
    """

    actor: Any
    outstanding: dict[int, Attempt] = field(default_factory=dict)
    stream: Any = None
    ready: Any = None
    where: Whereabouts | None = None
    deaths: int = 0
    alone: bool = False
    due: float = math.inf


class RayRollouts:
    """A ``Rollouts`` (see ``clew.rollout.rollouts``) whose engines are actors.

    Attempts wait in one place. An engine gets an even share, of neighbours, so that the samples of a task meet in one
    prefix cache; whenever it ends an episode it gets the next that waits, so all are busy until the last episodes. An
    episode stays with its engine. When an engine dies, its episodes go back to those that wait, and a new engine with
    the same adapter takes its place.

    Args:
        start_engine: makes the actor of an engine, by its number.
        engines: how many.
        note: told of engines that die.
        on_start: called when an engine has started.
        after_load: called with the names of the versions that engines may still need, after every engine has loaded.
        on_queue: told how many episodes of a batch wait for an engine, and how many are being played.
    """

    def __init__(
        self,
        start_engine: Callable[[int], Any],
        engines: int,
        player: Player,
        devices: int,
        note: Callable[[str], None],
        on_start: Callable[[], None],
        after_load: Callable[[set[str]], None],
        on_queue: Callable[[int, int], None] = lambda waiting, playing: None,
    ) -> None:
        self.start_engine, self.note, self.on_start, self.after_load = start_engine, note, on_start, after_load
        self.on_queue = on_queue
        self.player, self.devices, self.device = player, devices, ""
        self.engines = [_Engine(start_engine(i)) for i in range(engines)]
        for engine in self.engines:
            engine.ready = engine.actor.start.remote(None)
        self.version: StoredAdapter | None = None
        self.asleep = False
        self._jobs = itertools.count()

    def start(self) -> None:
        """Waits until every engine has loaded the model.

        Raises:
            UserError: as an engine raises it.
            RunFailed: engines die again and again.
        """
        self._on_all("wake")

    def load(self, version: Adapter | StoredAdapter | None) -> None:
        """See ``Rollouts.load``: returns when every engine has acknowledged the version.

        Raises:
            UserError: the version is damaged, or does not fit the model.
            RunFailed: engines die again and again.
        """
        assert not isinstance(version, Adapter), "an adapter reaches these engines through shared storage"
        if version is not None:  # engines work in directories of their own
            version = replace(version, folder=Path(os.path.abspath(version.folder)))
        before, self.version = self.version, version
        if self.asleep:
            self._on_all("wake")
            self.asleep = False
        expected = version.name if version else "base"
        for index, acknowledged in enumerate(self._on_all("load", version)):
            if acknowledged != expected:
                raise RunFailed(f"engine {index} says it has version {acknowledged} where {expected} was loaded")
        # The one before is kept too: a reader that is slow to let go must not find it gone.
        self.after_load({v.name for v in (before, version) if v})

    def sleep(self) -> None:
        """Engines give up their devices' memory until the next ``load``."""
        self._on_all("sleep")
        self.asleep = True

    def release(self) -> None:
        """See ``Rollouts.release``: engines forget a batch when it ends."""

    def play(
        self,
        make_env: MakeEnv,
        attempts: Sequence[tuple[Task, int]],
        sampling: Sampling,
        limits: Limits,
        seed_parts: tuple[int | str, ...],
        see: FrameFilter | None = None,
    ) -> list[Trajectory]:
        """See ``Rollouts.play``.

        Raises:
            RunFailed: engines die again and again, or one fails.
            UserError: as raised by an engine.
        """
        job = Job(next(self._jobs), make_env, sampling, limits, seed_parts, see)
        waiting = deque(Attempt(i, task, sample) for i, (task, sample) in enumerate(attempts))
        suspects: deque[Attempt] = deque()
        tries: Counter[int] = Counter()
        played: dict[int, Trajectory] = {}
        until = time.monotonic() + limits.deadline_s
        share = min(-(-len(attempts) // len(self.engines)), limits.concurrent)
        for engine in self.engines:
            engine.deaths = 0
            if engine.ready is None:
                self._begin(engine, job, _take(waiting, share), until)
        while len(played) < len(attempts):
            self.on_queue(len(waiting) + len(suspects), sum(len(engine.outstanding) for engine in self.engines))
            engine, outcome = self._next()
            if isinstance(outcome, list):
                engine.deaths = 0
                for place, trajectory in outcome:
                    del engine.outstanding[place]
                    played[place] = trajectory
            elif outcome is None:
                self._begin(engine, job, _take(waiting, limits.concurrent), until)
            else:
                guilty = engine.alone
                for attempt in self._replace(engine, outcome):
                    tries[attempt.place] += 1
                    if guilty:
                        played[attempt.place] = _lost(attempt)
                    elif tries[attempt.place] < TRIES:
                        waiting.append(attempt)
                    else:
                        suspects.append(attempt)
            self._hand_out(job, waiting, suspects, limits.concurrent, until)
        self.on_queue(0, 0)
        self._end(job)
        return [played[place] for place in range(len(attempts))]

    def _begin(self, engine: _Engine, job: Job, first: list[Attempt], until: float) -> None:
        _give(engine, first, until)
        left = replace(job.limits, deadline_s=max(until - time.monotonic(), 0.0))
        engine.stream = engine.actor.play.options(num_returns="streaming").remote(replace(job, limits=left), first)

    def _hand_out(self, job: Job, waiting: deque[Attempt], suspects: deque[Attempt], most: int, until: float) -> None:
        """Gives what waits to engines with room for it."""
        for engine in self.engines:
            if engine.stream is None or (engine.alone and engine.outstanding):
                continue
            engine.alone = False
            more = _take(waiting, most - len(engine.outstanding))
            if not more and suspects and not engine.outstanding:
                more, engine.alone = [suspects.popleft()], True
            if more:
                _give(engine, more, until)
                engine.actor.feed.remote(job.number, more)

    def _next(self) -> tuple[_Engine, list[tuple[int, Trajectory]] | Exception | None]:
        """The next thing that happens to an engine: episodes ended, it died of an error, or (None) it is ready."""
        watched = {id(e.stream or e.ready): e for e in self.engines if e.stream or e.ready}
        handles = [e.stream or e.ready for e in watched.values()]
        playing = [engine for engine in self.engines if engine.outstanding]
        first = min(playing, key=lambda engine: engine.due, default=None)
        timeout = max(first.due - time.monotonic(), 0) if first else _START_S
        done, _ = ray.wait(handles, num_returns=1, timeout=timeout)
        if not done:
            if first:
                return first, TimeoutError(f"no answer {_SILENCE_S:.0f} s after its deadline")
            starting = next(engine for engine in self.engines if engine.ready)
            return starting, TimeoutError(f"not ready after {_START_S:.0f} s")
        engine = watched[id(done[0])]
        try:
            if engine.stream is None:
                self._started(engine)
                return engine, None
            return engine, ray.get(next(engine.stream))
        except StopIteration:
            return engine, RuntimeError("it stopped playing too early")
        except RayError as error:
            return engine, cause_of(error)

    def _started(self, engine: _Engine) -> None:
        where: Whereabouts = ray.get(engine.ready)
        engine.where, engine.ready, self.device = where, None, where.device
        self.on_start()

    def _replace(self, engine: _Engine, error: Exception) -> list[Attempt]:
        """Starts another engine in the place of one that died; returns what that one had not finished.

        Raises:
            UserError: that is what it died of.
            RunFailed: this place has seen too many engines die.
        """
        if isinstance(error, UserError):
            raise error
        index = self.engines.index(engine)
        reason = describe(error)
        if engine.deaths >= (_DEATHS if isinstance(error, RayError | TimeoutError) else _FAULTS):
            raise RunFailed(f"engine {index} died {engine.deaths + 1} times in a row ({reason})")
        ray.kill(engine.actor)
        unfinished = list(engine.outstanding.values())
        again = f"; its {len(unfinished)} unfinished episodes are played again" if unfinished else ""
        self.note(f"engine {index} died ({reason}){again}; another one is started in its place")
        engine.deaths += 1
        engine.outstanding, engine.stream, engine.alone = {}, None, False
        engine.actor = self.start_engine(index)
        engine.ready = engine.actor.start.remote(self.version)
        return unfinished

    def _end(self, job: Job) -> None:
        """Closes a batch on every engine that took part in it."""
        playing = [engine for engine in self.engines if engine.stream is not None]
        for engine in playing:
            engine.actor.finish.remote(job.number)
        for engine in playing:
            try:
                ray.get(engine.stream.completed())
                engine.stream = None
            except RayError as error:
                self._replace(engine, cause_of(error))

    def _on_all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method on every engine and returns what they return; one that dies is replaced and asked again."""
        for engine in self.engines:
            engine.deaths = 0
        calls = {i: getattr(e.actor, method).remote(*arguments) for i, e in enumerate(self.engines) if not e.ready}
        answers = {}
        for index, engine in enumerate(self.engines):
            while index not in answers:
                try:
                    if engine.ready is not None:
                        self._started(engine)
                        calls[index] = getattr(engine.actor, method).remote(*arguments)
                    answers[index] = ray.get(calls[index])
                except RayError as error:
                    self._replace(engine, cause_of(error))
        return [answers[index] for index in range(len(self.engines))]


def _give(engine: _Engine, attempts: list[Attempt], until: float) -> None:
    """Notes that an engine plays these too. What is given after the deadline is typed soon, and not in no time."""
    engine.outstanding |= {attempt.place: attempt for attempt in attempts}
    engine.due = max(until, time.monotonic()) + _SILENCE_S


def _take(waiting: deque[Attempt], most: int) -> list[Attempt]:
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]


def _lost(attempt: Attempt) -> Trajectory:
    return Trajectory(attempt.task, attempt.sample, stop_reason=StopReason.ENGINE_LOST)
