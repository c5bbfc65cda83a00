"""Tells the author of an image environment what breaks the contract of ``ImageEnv``, and how to mend it.

problems = check_image_env(functools.partial(MyEnv, size=4))
assert not problems, problems
"""

from __future__ import annotations

import functools
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from typing import Any

import numpy as np

from clew.envs.base import ImageEnv
from clew.envs.probe import Moment, Probe, Unusable, difference, kind, named

_SEEDS = (0, 1, 12345)
_MANY_SEEDS = range(24)  # enough for a small world to show one problem twice
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


def check_image_env(make_env: Callable[[], ImageEnv]) -> list[str]:
    """Plays an environment in many ways and lists what breaks the contract of ``ImageEnv``.

    Args:
        make_env: makes a new environment at each call. With an importable class or a ``functools.partial`` of
            one, it is also checked that the settings can be pickled and that ``content_hash`` is the same in
            another process.

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
                "np.random",
                "the global state of `numpy.random` was changed: use numpy.random.default_rng(seed)",
            )
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    return list(checker.problems.values())


class _Checker(Probe):
    """The rules."""

    def run(self) -> None:
        checks = (
            self.check_repetition,
            self.check_contents,
            self.check_turn_cap,
            self.check_garbage,
            self.check_oracle,
            self.check_isolation,
            self.check_pickling,
        )
        with suppress(Unusable):
            self.check_attributes()
            for check in checks:
                with suppress(Unusable):
                    check()
        if "methods" not in self.problems:
            self.close_all()

    def close_all(self) -> None:
        for env in self.made:
            try:
                env.close()
            except Exception as error:
                self.note("close", f"close() raised {named(error)}: it must always succeed")

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
            raise Unusable
        self.max_turns, self.names = cap, names  # type: ignore[assignment]
        self.reset(env, 0)
        try:
            written = env.oracle_action()
        except Exception:  # check_oracle reports it
            return
        for name in sorted(self.names, key=len, reverse=True):
            if isinstance(written, str) and name in written:
                self.prefix, _, self.suffix = written.partition(name)
                return

    def check_repetition(self) -> None:
        used, fresh = self.make(), self.make()
        for seed in _SEEDS:
            first = self.play(used, seed, self.actions(seed))
            self.reset(used, seed + 1)
            self.step(used, self.write(self.names[0]))  # left in the middle: nothing of it may remain
            for env in (used, fresh):
                self._compare(first, self.play(env, seed, self.actions(seed)), seed)

    def _compare(self, first: list[Moment], second: list[Moment], seed: int) -> None:
        if different := difference(first, second):
            turn, what = different
            if turn == 0 and what == "content_hash":
                sentence = f"content_hash of seed {seed} changed between two resets: hash nothing but the problem"
            elif turn == 0:
                sentence = f"reset({seed}) gave another {what} the second time: a seed must always give one task"
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
            name, look = start.info["content_hash"], (start.facts()["frame"], start.facts()["text"])
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
                if difference(*plays) is None:
                    self.note(
                        "content_hash",
                        f"seeds {twin} and {seed} look and play the same but differ in content_hash: "
                        "hash the problem, not the seed, or held-out tasks turn up in training",
                    )
        elsewhere = _hash_in_another_process(self.make_env)
        if elsewhere is not None and elsewhere != self.reset(env, 0).info["content_hash"]:
            self.note(
                "content_hash",
                "content_hash of seed 0 is different in another process: use hashlib, "
                "for hash() is salted anew in each process",
            )

    def check_turn_cap(self) -> None:
        env = self.make()
        streams = [cycle([self.write(name)]) for name in self.names[:8]] + [self.actions(seed) for seed in range(4)]
        for seed, stream in enumerate(streams):
            if not self.play(env, seed, stream)[-1].over:
                self.note(
                    "cap",
                    f"the turn cap is not honoured: after max_turns = {self.max_turns} answers step returned "
                    "neither terminated nor truncated",
                )

    def check_garbage(self) -> None:
        env = self.make()
        harmless = []
        for called, answer in _GARBAGE.items():
            self.reset(env, 0)
            try:
                self.step(env, answer, called)
                harmless.append(answer)
            except Unusable:
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
                        "oracle",
                        f"oracle_action raised {named(error)}: without an oracle, raise NotImplementedError",
                    )
                    return
                if not isinstance(answer, str):
                    self.note(
                        "oracle",
                        f"oracle_action returned {kind(answer)}: return the text an agent would write",
                    )
                    return
                moments.append(self.step(env, answer, "the oracle's answer"))
            turns, length = len(moments) - 1, moments[0].info.get("path_length")
            if not moments[-1].over or moments[-1].info.get("success") is not True:
                self.note(
                    "oracle",
                    f"the oracle does not solve seed {seed} within max_turns = {self.max_turns}: "
                    "raise the cap, leave out such tasks, or mend the oracle",
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
                    except Unusable:
                        self.note("isolation", _SHARED)
                        return
        if any(difference(*pair) for pair in zip(alone, together, strict=True)):
            self.note("isolation", _SHARED)
        for moments in together:
            self.check_frames(moments)

    def check_pickling(self) -> None:
        if not isinstance(self.make_env, functools.partial):
            return
        for name, value in self.make_env.keywords.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                self.note(
                    "pickle",
                    f"the setting {name!r} can't be pickled ({named(error)}): "
                    "settings travel to other processes, so use plain values",
                )


_SHARED = (
    "two environments played in turn disturb each other: keep all state in the instance, none in the class or module"
)


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
    return child.stdout.decode().splitlines()[-1] if child.returncode == 0 else None


def _same_numpy_state(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
