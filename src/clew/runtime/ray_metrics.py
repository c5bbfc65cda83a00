"""A run's scalars among the metrics of its Ray cluster, where Prometheus finds them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ray.util.metrics import Gauge

_UNITS = (("_per_s", "_per_second"), ("_s", "_seconds"))


class RayMetrics:
    """A tracker's sink: every scalar is a gauge, called ``ray_clew_...`` once Ray has put its prefix before it.

    Args:
        run: value of the label that tells runs apart.
    """

    def __init__(self, run: str) -> None:
        self._labels = {"run": run}
        self._gauges: dict[str, Gauge] = {}

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """See ``Sink.scalars``."""
        for name, value in {**values, "step": float(step)}.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(prometheus_name(name), f"{name} of metrics.jsonl", tuple(self._labels))
            self._gauges[name].set(value, self._labels)

    def close(self) -> None:
        """See ``Sink.close``: Ray's agents hold what there is."""


def prometheus_name(name: str) -> str:
    """A metric's name as Prometheus wants it, units spelt out: ``timing/rollout_s`` is ``clew_rollout_seconds``."""
    plain = re.sub(r"\W+", "_", name.removeprefix("timing/"))
    for ending, unit in _UNITS:
        if plain.endswith(ending):
            plain = plain.removesuffix(ending) + unit
            break
    return f"clew_{plain}"
