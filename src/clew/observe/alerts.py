"""Alert rules for Prometheus: what a person should look at before the run has cost more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from clew.observe import metrics as m
from clew.observe.queries import by, latest, series

NODE_FREE, NODE_USED = "ray_node_disk_free", "ray_node_disk_usage"
"""Ray's own: bytes of each machine's disk."""


@dataclass(frozen=True)
class Alert:
    """A rule: it fires when the value has been beyond the threshold for a while.

    Attributes:
        value: an expression that has a value at any time of a run.
        compare: of the value with the threshold.
        wait: how long before it fires, as Prometheus writes durations.
    """

    name: str
    value: str
    compare: Literal["<", ">"]
    threshold: float
    wait: str
    severity: Literal["warning", "critical"]
    summary: str
    description: str

    @property
    def expression(self) -> str:
        """What Prometheus evaluates."""
        return f"{self.value} {self.compare} {self.threshold:g}"


# Five times the longest step of the last six hours, ten minutes at least; an hour for the first.
_PATIENCE = (
    f"(5 * clamp_min(max {by()} (max_over_time({series(m.STEP_SECONDS)}[6h])), 120)"
    f" or 3600 + 0 * {latest(m.STEP_TIMESTAMP)})"
)
_SMOOTH = f"max {by()} (avg_over_time({series(m.SOLVE_RATE)}[30m]))"

ALERTS: tuple[Alert, ...] = (
    Alert(
        "ClewStepStalled",
        f"(time() - {latest(m.STEP_TIMESTAMP)}) / {_PATIENCE}",
        ">",
        1,
        "1m",
        "critical",
        "Run {{ $labels.run }} finishes no step",
        "No step was finished for five times as long as the longest of the last six hours (at least ten minutes; an "
        "hour for the first). Look at `clew logs`, at the engines' queue, and at which worker is silent.",
    ),
    Alert(
        "ClewSolveRateFalling",
        f"max_over_time(({_SMOOTH})[6h:1m]) - {_SMOOTH}",
        ">",
        0.15,
        "10m",
        "warning",
        "The solve rate of run {{ $labels.run }} is falling",
        "The mean of the last 30 minutes lies {{ $value | humanizePercentage }} below the best such mean of the last "
        "six hours. Look at entropy, KL and the log-probability gap; an earlier checkpoint may be the better start.",
    ),
    Alert(
        "ClewLogprobGap",
        latest(m.LOGPROB_GAP, 'statistic="mean"'),
        ">",
        0.1,
        "10m",
        "warning",
        "Engine and trainer of run {{ $labels.run }} disagree",
        "Their log-probabilities of a sampled token differ by {{ $value | humanize }} nats on average: the engine may "
        "sample with another adapter, temperature, mask or precision than the trainer scores with.",
    ),
    Alert(
        "ClewStorageNearlyFull",
        f"min {by()} ({series(m.STORAGE_FREE)} / {series(m.STORAGE_SIZE)})",
        "<",
        0.1,
        "5m",
        "critical",
        "The storage of run {{ $labels.run }} is nearly full",
        "{{ $value | humanizePercentage }} are left where the run directory lies. A full file system ends the run; "
        "lower checkpoint.keep or make room.",
    ),
    Alert(
        "ClewNodeDiskNearlyFull",
        f"min by (instance, cluster_name, namespace, ray_io_cluster) ({NODE_FREE} / ({NODE_FREE} + {NODE_USED}))",
        "<",
        0.1,
        "5m",
        "warning",
        "The disk of {{ $labels.instance }} is nearly full",
        "{{ $value | humanizePercentage }} are left. Ray starts no work on a machine with less than 5 %.",
    ),
)


def rule_file(alerts: Sequence[Alert] = ALERTS) -> dict[str, Any]:
    """The contents of a Prometheus rule file."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.wait,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.description},
        }
        for alert in alerts
    ]
    return {"groups": [{"name": "clew", "rules": rules}]}
