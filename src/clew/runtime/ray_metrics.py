"""A run's scalars among the metrics of its Ray cluster, where Prometheus finds them."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from ray.util.metrics import Counter, Gauge

from clew.observe import metrics as table
from clew.observe.metrics import Metric


class RayMetrics:
    """A tracker's sink: what ``clew.observe.metrics`` lists, of every step.

    Args:
        run_dir: its name is the label that tells runs apart; the space left beside it is shown too.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(os.path.abspath(run_dir))
        self._made: dict[str, Gauge | Counter] = {}

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """See ``Sink.scalars``."""
        for metric, labels, value in table.shown(values):
            self._show(metric, value, labels)
        self._show(table.STEP, step)
        self._show(table.STEP_TIMESTAMP, time.time())
        with contextlib.suppress(OSError):  # storage that is away: whoever writes to it says so
            usage = shutil.disk_usage(self.run_dir)
            self._show(table.STORAGE_FREE, usage.free)
            self._show(table.STORAGE_SIZE, usage.total)

    def queue(self, waiting: int, playing: int) -> None:
        """Shows how many episodes wait for an engine, and how many are being played."""
        self._show(table.QUEUE, waiting, {"state": "waiting"})
        self._show(table.QUEUE, playing, {"state": "playing"})

    def close(self) -> None:
        """See ``Sink.close``: Ray's agents hold what there is."""

    def _show(self, metric: Metric, value: float, labels: Mapping[str, str] | None = None) -> None:
        made = self._made.get(metric.name)
        if made is None:
            kind = Counter if metric.kind == "counter" else Gauge
            made = self._made[metric.name] = kind(metric.name, metric.help, metric.label_names)
        tags = {"run": self.run_dir.name, **(labels or {})}
        if isinstance(made, Gauge):
            made.set(value, tags)
        elif value > 0:  # Ray refuses to add nothing
            made.inc(value, tags)
