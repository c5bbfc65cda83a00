"""Trackers: where scalars of a step go besides ``metrics.jsonl``, which training writes itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Sink(Protocol):
    """One place that keeps scalars. Another tracker (wandb, mlflow) is a class with these two methods."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Keeps the finite numbers of one step."""
        ...

    def close(self) -> None:
        """Flushes and lets go; called once."""
        ...


class TensorBoard:
    """TensorBoard event files.

    Args:
        log_dir: folder of the event files; made if absent.
        resumed_after: the last step that was kept when a run is continued. What an interrupted process wrote
            beyond it is purged from view, so a curve never shows a step twice. None for a fresh run.
    """

    def __init__(self, log_dir: Path, resumed_after: int | None = None) -> None:
        # Imported here: it takes a second, and most commands never log a scalar.
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resumed_after is None else resumed_after + 1
        self._writer: Any = SummaryWriter(str(log_dir), purge_step=purge)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run keeps every finished step

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """Sends the numbers of each step to every sink.

    Args:
        sinks: where to send them; none tracks nothing.
    """

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def log(self, metrics: Mapping[str, Any], timing: Mapping[str, Any] | None = None) -> None:
        """Logs one line of ``metrics.jsonl`` and, if given, of ``timing.jsonl`` (under ``timing/``).

        ``metrics["step"]`` is the step. Text, None and non-finite values are left out: a tracker draws
        numbers.
        """
        values = {name: float(v) for name, v in metrics.items() if name != "step" and _is_number(v)}
        for name, v in (timing or {}).items():
            if name != "step" and _is_number(v):
                values[f"timing/{name}"] = float(v)
        for sink in self._sinks:
            sink.scalars(values, int(metrics["step"]))

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
