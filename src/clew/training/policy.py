"""What a training loop asks of the policy in training, wherever it lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from clew.checkpoint import CheckpointStore
from clew.policy.adapter import Adapter, StoredAdapter
from clew.training.update import Sample


class Policy(Protocol):
    """The adapter in training and its optimizer: in this process (``Learner``), or sharded over workers."""

    def restore(self, folder: Path) -> None:
        """Goes back to a checkpoint, whatever number of ranks wrote it."""
        ...

    def update(self, samples: list[Sample], used: list[bool], step: int) -> dict[str, float]:
        """Learns from a step's samples (``used``: which carry signal) and returns metrics."""
        ...

    def publish(self, step: int) -> Adapter | StoredAdapter:
        """The adapter as it is now, as an immutable version that engines can load."""
        ...

    def export(self, folder: Path, card: dict[str, Any]) -> None:
        """Writes the current adapter ready to serve; ``card`` says where it comes from."""
        ...

    def save(self, store: CheckpointStore, step: int, state: str, facts: dict[str, Any]) -> None:
        """Saves everything needed to go on from here, and ``state`` (JSON) with it: whole or not at all."""
        ...
