"""Environments for tests of failing workers; a module of its own, so that workers can import it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from clew.envs.base import Observation
from clew.envs.maze_env import MazeEnv


class SlowMaze(MazeEnv):
    """A maze whose every step takes a while, so that a worker can be killed in the middle of an episode."""

    def __init__(self, pause_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.pause_s = pause_s

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        time.sleep(self.pause_s)
        return super().step(action)


class DeadlyMaze(MazeEnv):
    """A maze of which one task kills the process that plays it, as a crash in native code would."""

    def __init__(self, victim: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.victim = victim

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        if seed == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().reset(seed)


class HangingMaze(MazeEnv):
    """A maze of which one task never comes back from its second step."""

    def __init__(self, victim: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.victim, self.steps = victim, 0

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        self.hangs, self.steps = seed == self.victim, 0
        return super().reset(seed)

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.hangs and self.steps == 2:
            threading.Event().wait()
        return super().step(action)


class StampedMaze(MazeEnv):
    """A maze that leaves a file named by the process that plays it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder = folder

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        (self.folder / f"{os.getpid()}-{seed}").touch()
        return super().reset(seed)
