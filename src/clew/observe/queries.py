"""How series are chosen and brought together, in the dashboard and in the alert rules alike."""

from __future__ import annotations

from clew.observe.metrics import Metric

CLUSTER = ("cluster_name", "namespace", "ray_io_cluster")
"""Labels that HyperPod's observability add-on and KubeRay's monitors put on what they scrape; absent elsewhere."""


def by(*labels: str) -> str:
    """The labels that tell runs apart, and these: what is left of a series' labels in a result."""
    return f"by ({', '.join(('run', *CLUSTER, *labels))})"


def latest(metric: Metric, chosen: str = "", *labels: str) -> str:
    """The value of a gauge; the processes of a run that was continued are taken together.

    Args:
        chosen: matchers between braces, e.g. ``run=~"$run"``.
        labels: those of the metric's that tell values apart.
    """
    return f"max {by(*labels)} ({series(metric, chosen)})"


def series(metric: Metric, chosen: str = "") -> str:
    """A selector."""
    return f"{metric.exported}{{{chosen}}}" if chosen else metric.exported
