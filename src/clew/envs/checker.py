"""Tells the author of an image environment what breaks the contract of ``ImageEnv``, and how to mend it.

    problems = check_image_env(lambda: MyEnv(size=4))
    assert not problems, "\\n".join(problems)
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np

from clew.envs.base import ImageEnv, Observation

_SEEDS = (0, 1, 12345)
_MANY_SEEDS = range(24)  # enough for a small world to show one problem twice
_SLOW_S = 2.0
_GARBAGE = {
    "an empty answer": "",
    "white space": " \n\t ",
    "plain words": "I think I should look around first.",
    "an unclosed tag": "<action>",
    "an empty tag": "<action></action>",
    "an unknown action": "<action>no-such-action</action>",
    "brackets that never close": "((((((((([[[[[[{{{{{{'\"",
    "a pair of numbers": "('no_such_action', 99)",
    "a null character": "\x00",
    "accents and emoji": "é\u0301\u202e\u200d🧶🐂 左 اليسار",
    "a replacement character (cut UTF-8)": "<action>u\ufffd</action>",
    "special tokens as text": "<|im_end|><|vision_start|><|image_pad|>",
    "format directives": "%s %d {0} {action!r} \\1 \\N{BULL}",
    "100,000 letters": "a" * 100_000,
    "10,000 open tags": "<action>" * 10_000,
}


@dataclass
class _Moment:
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
            "text": self.observation.text,
            "reward": self.reward,
            "terminated": self.terminated,
            "truncated": self.truncated,
            **{key: self.info.get(key) for key in ("content_hash", "path_length", "success", "feedback")},
        }


class _Unusable(Exception):
    """The environment gave nothing to go on with; the problem is noted already."""


def check_image_env(make_env: Callable[[], ImageEnv]) -> list[str]:
    """Plays an environment in many ways and lists what breaks the contract of ``ImageEnv``.

    Args:
        make_env: makes a new environment at each call. With an importable class or a ``functools.partial`` of one,
            it is also checked that settings can be pickled and that ``content_hash`` is the same in another process.

    Returns:
        One sentence a problem: what is wrong and how to mend it. Empty: nothing was found.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    checker = _Checker(make_env)
    try:
        checker.run()
        if random.getstate() != python_state:
            checker.note("random", "the global state of `random` was changed: use a random.Random(seed) of your own")
        if not _same_numpy_state(np.random.get_state(), numpy_state):
            checker.note(
                "np.random", "the global state of `numpy.random` was changed: use numpy.random.default_rng(seed)"
            )
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    return list(checker.problems.values())


class _Checker:
    def __init__(self, make_env: Callable[[], ImageEnv]) -> None:
        self.make_env = make_env
        self.problems: dict[str, str] = {}  # the first sentence of each rule: one fault shows in many plays
        self.made: list[ImageEnv] = []
        self.max_turns = 0
        self.names: tuple[str, ...] = ()

    def note(self, rule: str, sentence: str) -> None:
        self.problems.setdefault(rule, sentence)

    def run(self) -> None:
        checks = (
            self.check_attributes,
            self.check_repetition,
            self.check_contents,
            self.check_turn_cap,
            self.check_garbage,
            self.check_oracle,
            self.check_isolation,
            self.check_pickling,
        )
        for check in checks:
            try:
                check()
            except _Unusable:
                if check == self.check_attributes:
                    break
        for env in self.made:
            try:
                env.close()
            except Exception as error:
                self.note("close", f"close() raised {_named(error)}: it must always succeed")

    # --- talking to the environment ----------------------------------------------------------------------

    def make(self) -> ImageEnv:
        try:
            env = self.make_env()
        except Exception as error:
            self.note("make", f"making the environment raised {_named(error)}")
            raise _Unusable from error
        if any(env is other for other in self.made):
            self.note("make", "make_env returned the same object twice: it must make a new environment at each call")
        else:
            self.made.append(env)
        return env

    def reset(self, env: ImageEnv, seed: int) -> _Moment:
        try:
            answer: Any = env.reset(seed)
        except Exception as error:
            self.note("reset raised", f"reset({seed}) raised {_named(error)}: every seed >= 0 must start a task")
            raise _Unusable from error
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
            self.note("reset returned", f"reset returned {_kind(answer)}: return (Observation, info)")
            raise _Unusable
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
        return self._moment("reset", observation, 0.0, False, False, info)

    def step(self, env: ImageEnv, answer: str, called: str = "a written action") -> _Moment:
        began = time.perf_counter()
        try:
            outcome: Any = env.step(answer)
        except Exception as error:
            self.note(
                f"step raised on {called}",
                f"step raised {_named(error)} on {called} ({answer[:40]!r}): whatever an agent writes must be "
                "played as a turn; answer what can't be parsed with feedback",
            )
            raise _Unusable from error
        seconds = time.perf_counter() - began
        if seconds > _SLOW_S:
            self.note("slow", f"step took {seconds:.1f} s on {called}: parse answers in linear time")
        if not (isinstance(outcome, tuple) and len(outcome) == 5 and isinstance(outcome[4], dict)):
            self.note(
                "step returned",
                f"step returned {_kind(outcome)}: return (Observation, reward, terminated, truncated, info)",
            )
            raise _Unusable
        observation, reward, terminated, truncated, info = outcome
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            self.note("reward", f"step returned reward {reward!r}: return a finite Python float")
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool):
                self.note(name, f"step returned {name} as {_kind(value)}: return a Python bool")
        if not isinstance(info.get("success"), bool):
            self.note(
                "success",
                f"info of step has success {info.get('success', 'missing')!r}: give a Python bool at every turn, "
                "true if and only if the goal was reached (it is never deduced from the reward)",
            )
        feedback = info.get("feedback")
        if not isinstance(feedback, str) or len(feedback.split()) != 1:
            self.note("feedback", f"info of step has feedback {feedback!r}: give one short word (moved, blocked, ...)")
        return self._moment("step", observation, reward, bool(terminated), bool(truncated), info)

    def _moment(self, call: str, observation: Any, *rest: Any) -> _Moment:
        if not isinstance(observation, Observation):
            self.note("observation", f"{call} returned {_kind(observation)} as observation: return an Observation")
            raise _Unusable
        image = observation.image
        if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            found = f"shape {image.shape}" if isinstance(image, np.ndarray) else _kind(image)
            self.note("image", f"{call} returned an image of {found}: it must be an array [height, width, 3]")
            raise _Unusable
        if image.dtype != np.uint8:
            self.note("dtype", f"{call} returned an image of dtype {image.dtype}: it must be uint8 (0 to 255)")
        if not image.flags.c_contiguous:
            self.note(
                "contiguous", f"{call} returned an image that is not contiguous: use numpy.ascontiguousarray"
            )
        if not isinstance(observation.text, str):
            self.note("text", f'{call} returned text of {_kind(observation.text)}: it must be a str ("" for none)')
        return _Moment(observation, image.copy(), *rest)

    def play(self, env: ImageEnv, seed: int, answers: Iterable[str], *, called: str = "a written action") -> list[_Moment]:
        """Plays until the end, or as long as there are answers; the frames are checked on the way."""
        moments = [self.reset(env, seed)]
        for answer in islice(answers, self.max_turns):
            moments.append(self.step(env, answer, called))
            if moments[-1].over:
                self._check_after_end(env, answer)
                break
        turns = len(moments) - 1
        if turns < self.max_turns and moments[-1].truncated:
            self.note("cap", f"step truncated an episode at turn {turns}, but max_turns is {self.max_turns}: make them agree")
        self._check_frames(moments)
        return moments

    def actions(self, seed: int) -> Iterator[str]:
        """An endless, seeded stream of written actions."""
        rng = random.Random(seed)
        while True:
            yield self.write(rng.choice(self.names))

    def write(self, name: str) -> str:
        """An action as the oracle would write it, where there is an oracle."""
        return self._prefix + name + self._suffix

    # --- the rules ---------------------------------------------------------------------------------------

    def check_attributes(self) -> None:
        env = self.make()
        missing = [m for m in ("reset", "step", "oracle_action", "close") if not callable(getattr(env, m, None))]
        if missing:
            self.note("methods", f"the environment has no method {', '.join(missing)}: an ImageEnv has all of them")
        for name in ("env_id", "prompt"):
            value = getattr(env, name, None)
            if not isinstance(value, str) or not value.strip():
                self.note(name, f"{name} is {value!r}: it must be a str with something in it")
        names = getattr(env, "action_names", None)
        if (
            not isinstance(names, tuple)
            or not names
            or not all(isinstance(n, str) and n for n in names)
            or len(set(names)) < len(names)
        ):
            self.note("action_names", f"action_names is {names!r}: it must be a tuple of different words")
            names = ("action",)
        cap = getattr(env, "max_turns", None)
        if not isinstance(cap, int) or isinstance(cap, bool) or cap < 1:
            self.note("max_turns", f"max_turns is {cap!r}: it must be a whole number of at least 1")
        if missing or "max_turns" in self.problems:
            raise _Unusable
        self.max_turns, self.names = cap, names  # type: ignore[assignment]
        self.reset(env, 0)
        self._prefix, self._suffix = "<action>", "</action>"
        try:
            written = env.oracle_action()
        except Exception:  # check_oracle reports it
            return
        for name in sorted(self.names, key=len, reverse=True):
            if isinstance(written, str) and name in written:
                self._prefix, _, self._suffix = written.partition(name)
                return

    def check_repetition(self) -> None:
        used, fresh = self.make(), self.make()
        for seed in _SEEDS:
            first = self.play(used, seed, self.actions(seed))
            self.reset(used, seed + 1)
            self.step(used, self.write(self.names[0]))  # left in the middle: nothing of it may remain
            for env in (used, fresh):
                self._compare(first, self.play(env, seed, self.actions(seed)), seed)

    def _compare(self, first: list[_Moment], second: list[_Moment], seed: int) -> None:
        if different := _difference(first, second):
            turn, what = different
            if turn == 0 and what == "content_hash":
                sentence = f"content_hash of seed {seed} changed between two resets: hash nothing but the problem"
            elif turn == 0:
                sentence = f"reset({seed}) gave another {what} the second time: a seed must always give the same task"
            else:
                sentence = (
                    f"the same answers after reset({seed}) gave another {what} at turn {turn}: "
                    "all chance must come from the seed, and reset must clear all state"
                )
            self.note("repetition", sentence)

    def check_contents(self) -> None:
        if "repetition" in self.problems or "content_hash" in self.problems:
            return
        env = self.make()
        by_hash: dict[str, tuple[int, Any]] = {}
        by_look: dict[Any, tuple[int, str]] = {}
        for seed in _MANY_SEEDS:
            start = self.reset(env, seed)
            name, look = start.info["content_hash"], (start.facts()["frame"], start.observation.text)
            other, other_look = by_hash.setdefault(name, (seed, look))
            if other_look != look:
                self.note(
                    "content_hash",
                    f"seeds {other} and {seed} show different problems with the same content_hash: "
                    "hash everything that makes the problem",
                )
            twin, twin_name = by_look.setdefault(look, (seed, name))
            if twin_name != name:
                plays = [self.play(env, s, self.actions(0)) for s in (twin, seed)]
                for play in plays:
                    del play[0].info["content_hash"]
                if _difference(*plays) is None:
                    self.note(
                        "content_hash",
                        f"seeds {twin} and {seed} look and play the same but differ in content_hash: hash the problem, "
                        "not the seed, or held-out tasks turn up in training",
                    )
        elsewhere = _hash_in_another_process(self.make_env)
        if elsewhere is not None and elsewhere != self.reset(env, 0).info["content_hash"]:
            self.note(
                "content_hash",
                "content_hash of seed 0 is different in another process: use hashlib; hash() is salted in each process",
            )

    def check_turn_cap(self) -> None:
        env = self.make()
        streams = [cycle([self.write(name)]) for name in self.names[:8]] + [self.actions(seed) for seed in range(4)]
        for seed, stream in enumerate(streams):
            if not self.play(env, seed, stream)[-1].over:
                self.note(
                    "cap",
                    f"the turn cap is not honoured: after max_turns = {self.max_turns} answers step returned neither "
                    "terminated nor truncated",
                )

    def check_garbage(self) -> None:
        env = self.make()
        harmless = []
        for called, answer in _GARBAGE.items():
            self.reset(env, 0)
            try:
                self.step(env, answer, called)
                harmless.append(answer)
            except _Unusable:
                continue
        if not harmless:
            return
        last = self.play(env, 0, cycle(harmless))[-1]
        if not last.over and "cap" not in self.problems:
            self.note(
                "garbage turn",
                f"{self.max_turns} answers that can't be parsed did not end the episode: each must count as a turn",
            )
        if last.info.get("success") is True:
            self.note("garbage success", "answers that can't be parsed reached success: they must change nothing")

    def _check_after_end(self, env: ImageEnv, answer: str) -> None:
        try:
            env.step(answer)
        except Exception:
            return  # as it should be; which exception is the author's choice
        self.note("after end", "step after the end of an episode went through: raise RuntimeError until reset is called")

    def _check_frames(self, moments: list[_Moment]) -> None:
        sizes = {moment.copy.shape for moment in moments}
        if len(sizes) > 1:
            self.note("size", f"frames of one episode have different shapes {sorted(sizes)}: keep one size an episode")
        if any(not np.array_equal(moment.observation.image, moment.copy) for moment in moments):
            self.note("buffer", "a frame changed after it was returned: return a new array (or a copy) at each turn")

    def check_oracle(self) -> None:
        env = self.make()
        for seed in range(8):
            moments = [self.reset(env, seed)]
            while not moments[-1].over and len(moments) <= self.max_turns:
                try:
                    answer: Any = env.oracle_action()
                except NotImplementedError:
                    return
                except Exception as error:
                    self.note(
                        "oracle", f"oracle_action raised {_named(error)}: raise NotImplementedError if there is no oracle"
                    )
                    return
                if not isinstance(answer, str):
                    self.note("oracle", f"oracle_action returned {_kind(answer)}: return the text an agent would write")
                    return
                moments.append(self.step(env, answer, "the oracle's answer"))
            turns, length = len(moments) - 1, moments[0].info.get("path_length")
            if not moments[-1].over or moments[-1].info.get("success") is not True:
                self.note(
                    "oracle",
                    f"the oracle does not solve seed {seed} within max_turns = {self.max_turns}: raise the cap, leave "
                    "out such tasks, or mend the oracle",
                )
            elif isinstance(length, int) and turns < length:
                self.note(
                    "path_length",
                    f"path_length of seed {seed} is {length}, but the oracle needs only {turns} turns: "
                    "it must be the length of a shortest solution",
                )

    def check_isolation(self) -> None:
        if "repetition" in self.problems:
            return
        envs = (self.make(), self.make())
        alone = [self.play(env, seed, self.actions(seed)) for seed, env in enumerate(envs)]
        together = [[self.reset(env, seed)] for seed, env in enumerate(envs)]
        streams = [self.actions(seed) for seed in range(2)]
        for turn in range(1, max(map(len, alone))):
            for moments, stream, env, expected in zip(together, streams, envs, alone, strict=True):
                if turn < len(expected) and not moments[-1].over:
                    try:
                        moments.append(self.step(env, next(stream)))
                    except _Unusable:
                        self.note("isolation", _SHARED)
                        return
        if any(_difference(*pair) for pair in zip(alone, together, strict=True)):
            self.note("isolation", _SHARED)
        for moments in together:
            self._check_frames(moments)

    def check_pickling(self) -> None:
        if not isinstance(self.make_env, functools.partial):
            return
        for name, value in self.make_env.keywords.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                self.note(
                    "pickle",
                    f"the setting {name!r} can't be pickled ({_named(error)}): settings travel to other processes, "
                    "so use plain values",
                )


_SHARED = (
    "two environments played in turn disturb each other: keep all state in the instance, none in the class or module"
)


def _difference(first: list[_Moment], second: list[_Moment]) -> tuple[int, str] | None:
    """The first turn at which two plays differ, and in what."""
    for turn, (one, other) in enumerate(zip(first, second, strict=False)):
        others = other.facts()
        for what, value in one.facts().items():
            if value != others[what]:
                return turn, what
    return None if len(first) == len(second) else (min(len(first), len(second)), "end")


_PRINT_HASH = "import pickle, sys; print(pickle.load(sys.stdin.buffer)().reset(0)[1]['content_hash'])"


def _hash_in_another_process(make_env: Callable[[], ImageEnv]) -> str | None:
    """``content_hash`` of seed 0 in a new Python process, or None where ``make_env`` can't be sent to one."""
    try:
        sent = pickle.dumps(make_env)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environ.pop("PYTHONHASHSEED", None)
    child = subprocess.run([sys.executable, "-c", _PRINT_HASH], input=sent, capture_output=True, env=environ)
    # A class of __main__ can't be imported there; that is no fault of the environment. The env may print too.
    return child.stdout.decode().split()[-1] if child.returncode == 0 else None


def _same_numpy_state(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _named(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__


def _kind(value: Any) -> str:
    article = type(value).__name__
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {article}"
