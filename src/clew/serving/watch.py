"""One episode as a stream of events: the loop plays it in a thread, and its turns are told as they come."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from clew.agent.ledger import StopReason, Trajectory, Turn
from clew.envs.base import Suite
from clew.envs.registry import make_env
from clew.errors import UserError
from clew.evaluation.evaluate import png_base64
from clew.evaluation.evaluator import suite_limits, suite_sampling
from clew.recipe import Recipe
from clew.rollout.episodes import Limits
from clew.serving.remote import RemoteRollouts

log = logging.getLogger(__name__)

Event = dict[str, Any]

ENDINGS = {
    StopReason.SUCCESS: "Solved",
    StopReason.WRONG_END: "Not solved: stopped in the wrong place",
    StopReason.TURN_CAP: "Not solved: all turns used",
    StopReason.TURN_TOKENS: "Not solved: an answer was too long",
    StopReason.TRAJECTORY_TOKENS: "Not solved: no room for another turn",
    StopReason.DEADLINE: "Not finished: out of time",
    StopReason.ENV_CRASHED: "Not finished: the environment failed",
    StopReason.ENGINE_LOST: "Not finished: the model gave no answer",
}


@dataclass(frozen=True)
class Walk:
    """What is to be walked.

    Attributes:
        suite, index: the task.
        mode: ``greedy``, or ``sampled`` at the recipe's temperature.
        attempt: which of the sampled walks; the same one draws the same numbers.
    """

    suite: Suite
    index: int
    mode: Literal["greedy", "sampled"]
    attempt: int


def start_walk(
    walk: Walk,
    recipe: Recipe,
    rollouts: RemoteRollouts,
    pool: Executor,
    deadline_s: float,
    when_over: Callable[[], None],
) -> AsyncIterator[Event]:
    """Starts to play one episode in a thread of ``pool``; what is returned yields what happens. Call it in a loop.

    ``start`` (the first frame; again if the environment had to be replaced), ``turn`` (an answer, and the frame it led
    to), and at the end ``end`` or ``error``. Frames are PNG files in base64. Whoever stops listening ends the episode
    at its next turn.

    Args:
        rollouts: its client is closed at the end.
        when_over: called when the thread is free again, whatever happened.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    teller = _Teller(lambda event: loop.call_soon_threadsafe(events.put_nowait, event), walk.suite)
    future = pool.submit(_play, walk, recipe, rollouts, deadline_s, teller)
    future.add_done_callback(lambda _: when_over())
    return _listen(events, teller)


async def _listen(events: asyncio.Queue[Event | None], teller: _Teller) -> AsyncIterator[Event]:
    try:
        while (event := await events.get()) is not None:
            yield event
    finally:
        teller.left.set()


class _Left(Exception):
    """Nobody listens any more."""


class _Teller:
    """Sees each frame before the model does (it is the loop's ``see``), and tells what led to it."""

    def __init__(self, tell: Callable[[Event | None], object], suite: Suite) -> None:
        self.tell, self.left = tell, threading.Event()
        self._suite, self._told = suite, 0

    def __call__(self, frame: np.ndarray, trajectory: Trajectory) -> np.ndarray:
        if self.left.is_set():
            raise _Left
        if trajectory.turns:
            self._turn(trajectory.turns[-1], frame)
        else:
            self._told = 0
            self.tell(
                {
                    "event": "start",
                    "frame": png_base64(frame),
                    "max_turns": self._suite.env_kwargs["max_turns"],
                    "path_length": trajectory.path_length,
                }
            )
        return frame

    def _turn(self, turn: Turn, frame: np.ndarray | None) -> None:
        self._told += 1
        self.tell(
            {
                "event": "turn",
                "answer": turn.answer,
                "action": turn.action,
                "feedback": turn.feedback,
                "frame": None if frame is None else png_base64(frame),
            }
        )

    def end(self, trajectory: Trajectory) -> None:
        """Tells what the frames did not: the last turn, and how it ended."""
        answered = [turn for turn in trajectory.turns if turn.answered]
        for turn in answered[self._told :]:
            self._turn(turn, trajectory.final_frame)
        assert trajectory.stop_reason is not None
        self.tell(
            {
                "event": "end",
                "solved": trajectory.success,
                "stop_reason": str(trajectory.stop_reason),
                "words": ENDINGS[trajectory.stop_reason],
            }
        )


def _play(walk: Walk, recipe: Recipe, rollouts: RemoteRollouts, deadline_s: float, teller: _Teller) -> None:
    suite, limits = walk.suite, suite_limits(recipe, walk.suite)
    try:
        (trajectory,) = rollouts.play(
            partial(make_env, suite.env_id, **suite.env_kwargs),
            [(suite.tasks[walk.index], walk.attempt)],
            suite_sampling(recipe, walk.mode),
            Limits(limits.max_tokens, min(limits.deadline_s, deadline_s), concurrent=1),
            ("watch", recipe.training.seed, walk.mode),
            teller,
        )
        teller.end(trajectory)
    except _Left:
        pass
    except UserError as error:  # the server's word: an adapter that can't be loaded, a key that is no longer valid
        teller.tell({"event": "error", "message": str(error)})
    except Exception:
        log.exception("a walk failed")
        teller.tell({"event": "error", "message": "the walk failed; the server's log says why"})
    finally:
        rollouts.client.close()
        teller.tell(None)
