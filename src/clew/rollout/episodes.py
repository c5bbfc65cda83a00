"""Plays episodes: many environments in lockstep, one engine, one token ledger an episode."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np

from clew.agent.ledger import StopReason, Trajectory, Turn
from clew.agent.template import ChatTemplate
from clew.envs.base import EnvironmentGone, ImageEnv, Observation, Task
from clew.errors import UserError
from clew.policy.vision import FramePatcher
from clew.rollout.engine import Completion, Engine, Sampling, derive_seed
from clew.rollout.env_calls import EnvCalls
from clew.rollout.feed import Attempt, Feed

log = logging.getLogger(__name__)

MakeEnv = Callable[[], ImageEnv]
FrameFilter = Callable[[np.ndarray, Trajectory], np.ndarray]


class Notation(Protocol):
    """How the turns of an episode are written down for an engine, and an engine's answer is read."""

    def show(self, trajectory: Trajectory, text: str, frame: np.ndarray) -> None:
        """Appends an observation, the first or the next one, to the record of tokens: all of it, or nothing."""
        ...

    def read(self, completion: Completion) -> str:
        """The answer in words, without its end of turn."""
        ...


@dataclass(frozen=True)
class Player:
    """The notation of a model folder: its template and image processor turn observations into tokens."""

    template: ChatTemplate
    patcher: FramePatcher

    def show(self, trajectory: Trajectory, text: str, frame: np.ndarray) -> None:
        """See ``Notation.show``."""
        grid = self.patcher.grid(frame)
        count = grid[0] * grid[1] * grid[2] // self.patcher.merge**2
        if trajectory.turns:
            ids = self.template.continuation(text, count, ended=True)  # a cut answer ends the episode
        else:
            ids = self.template.opening(trajectory.prompt, text, count)
        trajectory.append_prompt(ids, grid)

    def read(self, completion: Completion) -> str:
        """See ``Notation.read``."""
        return self.template.tokenizer.decode(completion.ids[:-1] if completion.ended else completion.ids)


@dataclass(frozen=True)
class Limits:
    """Token and time budgets.

    Attributes:
        max_tokens: of a whole trajectory, prompt and images included.
        deadline_s: seconds a batch of episodes may take; what has not ended by then is an infrastructure stop.
        concurrent: episodes that an engine plays at a time.
    """

    max_tokens: int
    deadline_s: float = float("inf")
    concurrent: int = 128


class _Episode:
    """One attempt in progress: an environment and the trajectory it writes.

    What it calls of its environment runs on another thread (``EnvCalls``); the trajectory is written here alone.
    """

    def __init__(
        self, attempt: Attempt, player: Notation, make_env: MakeEnv, calls: EnvCalls[_Episode], see: FrameFilter | None
    ) -> None:
        self.attempt, self.player, self.make_env, self.calls, self.see = attempt, player, make_env, calls, see
        self.replayed = self.answered = False
        self.env: ImageEnv | None = None
        self.trajectory = Trajectory(attempt.task, attempt.sample)
        self._lock = threading.Lock()
        self._in_env = self._left = False  # guarded by the lock
        self._start(self._open)

    def _start(self, call: Callable[[], Any]) -> None:
        self._in_env = True
        self.calls.start(self, partial(self._run, call))

    def _run(self, call: Callable[[], Any]) -> Any:
        """On another thread. An episode that was left behind meanwhile is closed here: nobody else will."""
        try:
            return call()
        finally:
            with self._lock:
                self._in_env = False
                left = self._left
            if left:
                self._close_env()

    def _open(self) -> tuple[Observation, dict[str, Any]]:
        self.env = self.make_env()
        return self.env.reset(self.attempt.task.seed)

    @property
    def living(self) -> bool:
        return self.trajectory.stop_reason is None

    @property
    def waiting(self) -> bool:
        """Whether it is the environment's turn."""
        return self.calls.running(self)

    @property
    def ready(self) -> bool:
        """Whether it is the agent's turn."""
        return self.living and not self.waiting

    def begin(self, observation: Observation, info: dict[str, Any]) -> None:
        """Shows the first observation."""
        assert self.env is not None
        task = self.attempt.task
        if info["content_hash"] != task.content_hash:
            raise ValueError(
                f"{task.env_id} seed {task.seed} made content {info['content_hash']}, "
                f"the task says {task.content_hash}: its settings differ from those of the task list"
            )
        self.trajectory.path_length = info.get("path_length")
        self.trajectory.prompt = self.env.prompt
        self._show(observation)

    def _show(self, observation: Observation) -> None:
        frame = self.see(observation.image, self.trajectory) if self.see else observation.image
        # Text, image and grid are committed together or not at all.
        self.player.show(self.trajectory, observation.text, frame)
        self.trajectory.turns.append(Turn(observation.text, frame))

    def fits(self, limits: Limits, sampling: Sampling) -> bool:
        return len(self.trajectory.token_ids) + sampling.max_new_tokens <= limits.max_tokens

    def answer(self, completion: Completion) -> None:
        """Records an answer and has the environment play it."""
        assert self.env is not None
        if completion.stop is not None:
            self.stop(completion.stop)
            return
        trajectory, turn = self.trajectory, self.trajectory.turns[-1]
        turn.start = len(trajectory.token_ids)
        trajectory.append_sampled(completion.ids, completion.logprobs)
        turn.end = len(trajectory.token_ids)
        turn.answer, turn.answered = self.player.read(completion), True
        if not completion.ended:
            self.stop(StopReason.TURN_TOKENS)
            return
        self.answered = True
        self._start(partial(self.env.step, turn.answer))

    def absorb(self, outcome: Any, error: Exception | None) -> None:
        """Takes in what came of the environment's turn."""
        if not self.living:
            return
        if error is None:
            if self.answered:
                self._continue(*outcome)
            else:
                self.begin(*outcome)
        elif isinstance(error, UserError):  # the recipe's fault: a second try would not help
            raise error
        else:
            self._crashed("step" if self.answered else "reset", error)

    def _continue(
        self, observation: Observation, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]
    ) -> None:
        trajectory, turn = self.trajectory, self.trajectory.turns[-1]
        turn.reward, turn.feedback, turn.action = reward, info.get("feedback", ""), info.get("action")
        trajectory.reward += reward
        if terminated or truncated:
            trajectory.success = bool(info.get("success"))
            trajectory.final_frame = observation.image
            if trajectory.success:
                self.stop(StopReason.SUCCESS)
            else:
                self.stop(StopReason.WRONG_END if terminated else StopReason.TURN_CAP)
        else:
            self._show(observation)

    def _crashed(self, during: str, error: Exception) -> None:
        """An environment's exception is infrastructure: once it is replaced and the episode played again."""
        task = self.attempt.task
        log.warning("%s seed %d raised in %s", task.env_id, task.seed, during, exc_info=error)
        self.close()
        innocent = isinstance(error, EnvironmentGone)
        if self.replayed and not innocent:
            self.stop(StopReason.ENV_CRASHED)
        else:
            self.replayed, self.answered = self.replayed or not innocent, False
            self.trajectory = Trajectory(task, self.attempt.sample)
            self._start(self._open)

    def stop(self, reason: StopReason) -> None:
        """Ends the episode."""
        self.trajectory.stop_reason = reason

    def close(self) -> None:
        """Closes the environment, if one is open; one that fails at that harms no other episode."""
        with self._lock:
            self._left = self._in_env
        if self._left:
            log.warning(
                "%s seed %d has not come back from its environment; it is left behind",
                self.attempt.task.env_id,
                self.attempt.task.seed,
            )
        else:
            self._close_env()

    def _close_env(self) -> None:
        env, self.env = self.env, None
        if env is not None:
            try:
                env.close()
            except Exception:
                log.warning(
                    "%s seed %d raised in close", self.attempt.task.env_id, self.attempt.task.seed, exc_info=True
                )


def play(
    engine: Engine,
    player: Notation,
    make_env: MakeEnv,
    attempts: Sequence[tuple[Task, int]],
    sampling: Sampling,
    limits: Limits,
    seed_parts: tuple[int | str, ...],
    see: FrameFilter | None = None,
) -> list[Trajectory]:
    """Plays one episode for each (task, sample) and returns their trajectories in that order.

    Every draw derives from ``seed_parts``, the task, the sample and the turn, so an episode does not depend on
    which others are played beside it (up to the last bits of batched arithmetic).

    Args:
        see: replaces a frame before the agent sees it (for the sight test); closed at the end if it can be.
    """
    feed = Feed((Attempt(i, task, sample) for i, (task, sample) in enumerate(attempts)), closed=True)
    rounds = play_feed(engine, player, make_env, feed, sampling, limits, seed_parts, see)
    played = dict(chain.from_iterable(rounds))
    return [played[index] for index in range(len(attempts))]


def play_feed(
    engine: Engine,
    player: Notation,
    make_env: MakeEnv,
    feed: Feed,
    sampling: Sampling,
    limits: Limits,
    seed_parts: tuple[int | str, ...],
    see: FrameFilter | None = None,
) -> Iterator[list[tuple[int, Trajectory]]]:
    """Plays what a feed holds until it is closed and empty; yields (place, trajectory) of episodes as they end."""
    until = time.monotonic() + limits.deadline_s
    patience_s = min(engine.patience_s, limits.deadline_s / 20)
    calls: EnvCalls[_Episode] = EnvCalls()
    episodes: list[_Episode] = []
    asked: dict[int, _Episode] = {}  # by the identity of their trajectory
    try:
        while True:
            room = limits.concurrent - len(episodes)
            attempts = feed.take(room, wait=not episodes) if room > 0 else []
            episodes += [_Episode(attempt, player, make_env, calls, see) for attempt in attempts]
            if not episodes:
                return
            # What an environment did while the engine was at work counts, even when the deadline has passed meanwhile.
            waiting_ends = max(until, time.monotonic() + 0.1)
            # Where environments are all there is to wait for, an attempt that is fed meanwhile goes first.
            more = feed.has_more if limits.concurrent > len(episodes) else lambda: False
            for episode, outcome, error in calls.wait(
                patience_s, until=waiting_ends, at_least_one=not asked, unless=more
            ):
                episode.absorb(outcome, error)
            late = time.monotonic() > until
            for episode in episodes:
                trajectory = episode.trajectory
                if late and episode.living:
                    episode.stop(StopReason.DEADLINE)
                    engine.abandon(trajectory)
                    asked.pop(id(trajectory), None)
                elif episode.ready and id(trajectory) not in asked:
                    if episode.fits(limits, sampling):
                        turn = len(trajectory.turns)
                        seed = derive_seed(*seed_parts, trajectory.task.content_hash, trajectory.sample, turn)
                        engine.submit(trajectory, sampling, seed)
                        asked[id(trajectory)] = episode
                    else:
                        episode.stop(StopReason.TRAJECTORY_TOKENS)
            ended = [e for e in episodes if not e.living]
            for episode in ended:
                episodes.remove(episode)
                episode.close()
                engine.abandon(episode.trajectory)
                episode.trajectory.policy_version = engine.version
            if ended:
                yield [(episode.attempt.place, episode.trajectory) for episode in ended]
            if asked and not ended:  # places that became free are filled before the engine goes on
                for trajectory, completion in engine.collect():
                    asked.pop(id(trajectory)).answer(completion)
    finally:
        for episode in episodes:
            engine.abandon(episode.trajectory)
            episode.close()
        calls.close()
        if (close := getattr(see, "close", None)) is not None:
            close()
