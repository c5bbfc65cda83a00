"""Child processes in which VisGym's environments live; a dead one is replaced."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clew.envs.base import EnvironmentGone
from clew.errors import UserError

START_TIMEOUT_S = 120.0
REPLY_TIMEOUT_S = 60.0
_MAX_LINE = 1 << 26  # bytes
CHILD = (sys.executable, str(Path(__file__).with_name("child.py")))
"""Command of a child, to which the folder of the fork is added."""


class ChildLost(RuntimeError):
    """The process that an environment lived in died at its request, or did not answer it in time and was killed."""


class ChildGone(EnvironmentGone):
    """The process that an environment lived in died at the request of another one."""


class ChildFault(RuntimeError):
    """The environment raised an exception; its process lives on."""


class Child:
    """One process and the pipes to it; one request at a time.

    Raises:
        ChildLost: it did not start.
        UserError: it started and could not load the fork.
    """

    def __init__(self, command: Sequence[str], reply_timeout_s: float = REPLY_TIMEOUT_S) -> None:
        self.reply_timeout_s = reply_timeout_s
        self.lock = threading.Lock()
        self.load = 0  # environments that live in it
        self._buffer = bytearray()
        # A session of its own: Ctrl-C on the terminal is the parent's to handle.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout
        try:
            hello, _ = self._receive(time.monotonic() + START_TIMEOUT_S)
        except ChildLost:
            self.kill()
            raise
        if "error" in hello:
            self.kill()
            raise UserError(f"environment.id: VisGym could not be loaded ({hello['error']})")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
        """The reply to a request and the frame that came with it, uint8 [height, width, 3].

        Raises:
            ChildFault: the environment raised.
            ChildLost: the process died, or did not answer in ``reply_timeout_s``.
            ChildGone: it was dead already.
        """
        with self.lock:
            try:
                self._to.write(json.dumps(request).encode() + b"\n")
            except (OSError, ValueError) as error:  # a broken or a closed pipe
                self.kill()
                raise ChildGone(f"VisGym's process {self.process.pid} is gone") from error
            try:
                reply, frame = self._receive(time.monotonic() + self.reply_timeout_s)
            except (OSError, ValueError) as error:  # a pipe that broke, or what is no JSON
                self.kill()
                raise ChildLost(f"VisGym's process {self.process.pid} can't be understood ({error})") from error
            except BaseException:  # Ctrl-C too: a reply that is not read would be taken for the next request's
                self.kill()
                raise
        if "error" in reply:
            raise ChildFault(reply["error"])
        return reply, frame

    def kill(self) -> None:
        """Ends the process at once."""
        self.process.kill()
        self.process.wait()
        self._to.close()
        self._from.close()

    def _receive(self, until: float) -> tuple[dict[str, Any], np.ndarray | None]:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MAX_LINE:
                raise ChildLost(f"VisGym's process {self.process.pid} answers without end")
            self._read(until)
        reply = json.loads(self._buffer[:end])
        del self._buffer[: end + 1]
        if "frame" not in reply:
            return reply, None
        shape = tuple(reply["frame"])
        frame = np.empty(shape, np.uint8)
        target = memoryview(frame.reshape(-1))  # type: ignore[arg-type]  # an array is a buffer
        have = min(len(self._buffer), len(target))
        target[:have] = self._buffer[:have]
        del self._buffer[:have]
        while have < len(target):
            self._wait(until)
            if not (got := self._from.readinto(target[have:])):  # type: ignore[attr-defined]  # a raw pipe has it
                raise ChildLost(self._why())
            have += got
        return reply, frame

    def _read(self, until: float) -> None:
        self._wait(until)
        if not (chunk := os.read(self._from.fileno(), 1 << 16)):
            raise ChildLost(self._why())
        self._buffer += chunk

    def _wait(self, until: float) -> None:
        poll = select.poll()  # unlike select, it takes any file descriptor
        poll.register(self._from, select.POLLIN)
        if not poll.poll(max(until - time.monotonic(), 0) * 1000):
            raise ChildLost(f"VisGym's process {self.process.pid} did not answer in time and was ended")

    def _why(self) -> str:
        return f"VisGym's process {self.process.pid} died (exit status {self.process.wait()})"


class Pool:
    """Keeps up to ``children`` processes; each new environment goes where the fewest live."""

    def __init__(self, command: Sequence[str], children: int) -> None:
        self.command, self.size = tuple(command), children
        self.numbers = itertools.count()
        self._children: list[Child] = []
        self._lock = threading.Lock()

    def take(self) -> Child:
        """A living child for one more environment; give it back with ``leave``.

        Raises:
            ChildLost: none could be started.
        """
        with self._lock:
            self._children = [child for child in self._children if child.alive]
            idle = any(child.load == 0 for child in self._children)
            if len(self._children) < self.size and not idle:
                self._children.append(Child(self.command))
            child = min(self._children, key=lambda each: each.load)
            child.load += 1
            return child

    def leave(self, child: Child) -> None:
        """One environment less lives in this child."""
        with self._lock:
            child.load -= 1

    def close(self) -> None:
        """Ends all processes."""
        with self._lock:
            for child in self._children:
                child.kill()
            self._children.clear()


processes = 2
"""How many processes the environments of this one are spread over; set by ``configure``."""
_pools: dict[tuple[tuple[str, ...], int], Pool] = {}
_pools_lock = threading.Lock()


def pool(command: Sequence[str], children: int | None = None) -> Pool:
    """The pool of this process for a command, made once and ended with the process."""
    key = (tuple(command), children or processes)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = Pool(*key)
            atexit.register(_pools[key].close)
        return _pools[key]
