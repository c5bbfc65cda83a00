"""Who plays episodes for a training loop or an evaluation: one engine in this process, or many elsewhere."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from clew.agent.ledger import Trajectory
from clew.envs.base import Task
from clew.policy.adapter import Adapter, StoredAdapter
from clew.policy.model import VisionLanguageModel
from clew.policy.vision import FeatureCache
from clew.rollout.engine import Sampling
from clew.rollout.episodes import FrameFilter, Limits, MakeEnv, Player, play
from clew.rollout.transformers_engine import TransformersEngine


class Plays(Protocol):
    """Plays episodes under one policy version."""

    def play(
        self,
        make_env: MakeEnv,
        attempts: Sequence[tuple[Task, int]],
        sampling: Sampling,
        limits: Limits,
        seed_parts: tuple[int | str, ...],
        see: FrameFilter | None = None,
    ) -> list[Trajectory]:
        """Plays one episode for each (task, sample); see ``clew.rollout.episodes.play``."""
        ...

    def release(self) -> None:
        """Forgets what engines keep of the episodes played."""
        ...


class Rollouts(Plays, Protocol):
    """Plays episodes under the policy version that it is given.

    Attributes:
        player: what turns observations into tokens.
        device: what the engines compute on, in words.
        devices: how many of those the run occupies.
    """

    player: Player
    device: str
    devices: int

    def load(self, version: Adapter | StoredAdapter | None) -> None:
        """Makes every engine sample under this version (None: the base model); returns when all of them do."""
        ...


class LocalRollouts:
    """One transformers engine in this process."""

    devices = 1

    def __init__(self, engine: TransformersEngine, player: Player) -> None:
        self.engine, self.player = engine, player
        self.device = device_name(engine.vlm.device)

    @classmethod
    def of(cls, vlm: VisionLanguageModel, features: FeatureCache) -> LocalRollouts:
        """With a model whose vision features serve a trainer too."""
        return cls(TransformersEngine(vlm, features), Player(vlm.template, vlm.patcher))

    def load(self, version: Adapter | StoredAdapter | None) -> None:
        """See ``Rollouts.load``."""
        self.engine.load_adapter(version)

    def play(
        self,
        make_env: MakeEnv,
        attempts: Sequence[tuple[Task, int]],
        sampling: Sampling,
        limits: Limits,
        seed_parts: tuple[int | str, ...],
        see: FrameFilter | None = None,
    ) -> list[Trajectory]:
        """See ``Rollouts.play``."""
        return play(self.engine, self.player, make_env, attempts, sampling, limits, seed_parts, see)

    def release(self) -> None:
        """See ``Rollouts.release``."""
        self.engine.release()


def device_name(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {names[0] if names else platform.processor() or platform.machine()}"
