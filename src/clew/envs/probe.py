"""Plays an environment on behalf of the checker and notes what is wrong with whatever it returns."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np

from clew.envs.base import ImageEnv, Observation

_SLOW_S = 2.0


@dataclass
class Moment:
    """One observation with what came along; ``copy`` is the frame as it was when it was handed out."""

    observation: Observation
    copy: np.ndarray
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    def facts(self) -> dict[str, Any]:
        """Everything that a repetition must repeat, by name."""
        return {
            "frame": (self.copy.shape, self.copy.tobytes()),
            # repr: whatever a faulty environment put there can be compared
            "text": repr(self.observation.text),
            "reward": repr(self.reward),
            "terminated": self.terminated,
            "truncated": self.truncated,
            **{key: repr(self.info.get(key)) for key in ("content_hash", "path_length", "success", "feedback")},
        }


class Unusable(Exception):
    """The environment gave nothing to go on with; the problem is noted already."""


class Probe:
    """Makes environments and plays them.

    Every method notes problems, and raises ``Unusable`` where it can't go on.

    Attributes:
        problems: a sentence for each broken rule (the first one: one fault shows in many plays).
        made: the environments made so far.
        max_turns, names: of the environment, once they are known to be in order.
        prefix, suffix: what is written around the name of an action.
    """

    def __init__(self, make_env: Callable[[], ImageEnv]) -> None:
        self.make_env = make_env
        self.problems: dict[str, str] = {}
        self.made: list[ImageEnv] = []
        self.max_turns = 0
        self.names: tuple[str, ...] = ()
        self.prefix, self.suffix = "<action>", "</action>"

    def note(self, rule: str, sentence: str) -> None:
        """Keeps the sentence unless the rule has one already."""
        self.problems.setdefault(rule, sentence)

    def make(self) -> ImageEnv:
        """A new environment."""
        try:
            env = self.make_env()
        except Exception as error:
            self.note("make", f"making the environment raised {named(error)}")
            raise Unusable from error
        if any(env is other for other in self.made):
            self.note("make", "make_env returned the same object twice: it must make a new environment at each call")
        else:
            self.made.append(env)
        return env

    def reset(self, env: ImageEnv, seed: int) -> Moment:
        """``env.reset(seed)``, with everything it returns checked."""
        try:
            answer: Any = env.reset(seed)
        except Exception as error:
            self.note("reset raised", f"reset({seed}) raised {named(error)}: every seed >= 0 must start a task")
            raise Unusable from error
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            self.note("reset returned", f"reset returned {kind(answer)}: return (Observation, info)")
            raise Unusable
        observation, info = answer
        content_hash = info.get("content_hash")
        if not isinstance(content_hash, str) or not content_hash:
            self.note(
                "content_hash",
                f"info of reset has content_hash {content_hash!r}: it must be a str that hashes what makes the problem",
            )
        if "path_length" not in info or not isinstance(info["path_length"], int | None):
            self.note(
                "path_length",
                f"info of reset has path_length {info.get('path_length', 'missing')!r}: "
                "give the moves of a shortest solution as an int, or None if unknown",
            )
        return self._moment("reset", observation, 0.0, False, False, dict(info))

    def step(self, env: ImageEnv, answer: str, called: str = "a written action") -> Moment:
        """``env.step(answer)``, all it returns checked; ``called`` names the answer in sentences."""
        began = time.process_time()  # CPU time: a busy machine is no fault of the parser
        try:
            outcome: Any = env.step(answer)
        except Exception as error:
            self.note(
                f"step raised on {called}",
                f"step raised {named(error)} on {called} ({answer[:40]!r}): whatever an agent writes must be "
                "played as a turn; answer what can't be parsed with feedback",
            )
            raise Unusable from error
        seconds = time.process_time() - began
        if seconds > _SLOW_S:
            self.note("slow", f"step took {seconds:.1f} s of CPU time on {called}: parse answers in linear time")
        if not (isinstance(outcome, tuple) and len(outcome) == 5 and isinstance(outcome[4], dict)):
            self.note(
                "step returned",
                f"step returned {kind(outcome)}: return (Observation, reward, terminated, truncated, info)",
            )
            raise Unusable
        observation, reward, terminated, truncated, info = outcome
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            self.note("reward", f"step returned reward {reward!r}: return a finite Python float")
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool):
                self.note(name, f"step returned {name} as {kind(value)}: return a Python bool")
        if not isinstance(info.get("success"), bool):
            self.note(
                "success",
                f"info of step has success {info.get('success', 'missing')!r}: give a Python bool at every "
                "turn, true if and only if the goal was reached (it is never deduced from the reward)",
            )
        feedback = info.get("feedback")
        if not isinstance(feedback, str) or len(feedback.split()) != 1:
            self.note(
                "feedback",
                f"info of step has feedback {feedback!r}: give one short word (moved, blocked, ...)",
            )
        return self._moment("step", observation, reward, bool(terminated), bool(truncated), dict(info))

    def _moment(self, call: str, observation: Any, *rest: Any) -> Moment:
        if not isinstance(observation, Observation):
            self.note("observation", f"{call} returned {kind(observation)} as observation: return an Observation")
            raise Unusable
        image, text = observation.image, cast(Any, observation.text)
        if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            found = f"shape {image.shape}" if isinstance(image, np.ndarray) else kind(image)
            self.note("image", f"{call} returned an image of {found}: it must be an array [height, width, 3]")
            raise Unusable
        if image.dtype != np.uint8:
            self.note("dtype", f"{call} returned an image of dtype {image.dtype}: it must be uint8 (0 to 255)")
        if not image.flags.c_contiguous:
            self.note("contiguous", f"{call} returned an image that is not contiguous: use numpy.ascontiguousarray")
        if not isinstance(text, str):
            self.note("text", f'{call} returned text of {kind(text)}: it must be a str ("" for none)')
        return Moment(observation, image.copy(), *rest)

    def play(self, env: ImageEnv, seed: int, answers: Iterable[str]) -> list[Moment]:
        """Plays until the end or the turn cap; checks the frames and that nothing goes on after the end."""
        moments = [self.reset(env, seed)]
        for answer in islice(answers, self.max_turns):
            moments.append(self.step(env, answer))
            if moments[-1].over:
                self._check_after_end(env, answer)
                break
        turns = len(moments) - 1
        if turns < self.max_turns and moments[-1].truncated:
            self.note(
                "cap",
                f"step truncated an episode at turn {turns}, but max_turns is {self.max_turns}: make them agree",
            )
        self.check_frames(moments)
        return moments

    def actions(self, seed: int) -> Iterator[str]:
        """An endless, seeded stream of written actions."""
        rng = random.Random(seed)
        while True:
            yield self.write(rng.choice(self.names))

    def write(self, name: str) -> str:
        """An action as the oracle would write it, where there is an oracle."""
        return self.prefix + name + self.suffix

    def _check_after_end(self, env: ImageEnv, answer: str) -> None:
        try:
            env.step(answer)
        except Exception:
            return  # as it should be; which exception is the author's choice
        self.note(
            "after end",
            "step after the end of an episode went through: raise RuntimeError until reset is called",
        )

    def check_frames(self, moments: list[Moment]) -> None:
        """One size an episode, and no frame changed after it was handed out."""
        sizes = {moment.copy.shape for moment in moments}
        if len(sizes) > 1:
            self.note(
                "size",
                f"frames of one episode have different shapes {sorted(sizes)}: keep one size an episode",
            )
        if any(not np.array_equal(moment.observation.image, moment.copy) for moment in moments):
            self.note("buffer", "a frame changed after it was returned: return a new array (or a copy) at each turn")


def difference(first: list[Moment], second: list[Moment]) -> tuple[int, str] | None:
    """The first turn at which two plays differ, and in what."""
    for turn, (one, other) in enumerate(zip(first, second, strict=False)):
        others = other.facts()
        for what, value in one.facts().items():
            if value != others[what]:
                return turn, what
    return None if len(first) == len(second) else (min(len(first), len(second)), "end")


def named(error: Exception) -> str:
    """An exception in a sentence."""
    text = str(error)
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__


def kind(value: Any) -> str:
    """The type of a value in a sentence."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a value of type {type(value).__name__}"
