"""Clew's Grafana dashboard, as the JSON that Grafana loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from clew.observe import metrics as m
from clew.observe.alerts import NODE_FREE, NODE_USED
from clew.observe.metrics import Metric
from clew.observe.queries import by, latest, series

UID = "clew-training"
RAY_TAG = "ray"
"""By this tag the dashboard finds Ray's own, which lie beside it."""
_WIDTH, _HEIGHT = 8, 8  # of a panel, on Grafana's grid of 24 columns
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CLUSTER_VARIABLES = {"cluster_name": "cluster_name", "namespace": "namespace", "Cluster": "ray_io_cluster"}
"""Grafana's variables that choose a cluster, named as in Ray's dashboards, and the labels they stand for."""
_PLACE = ",".join(f'{label}=~"${variable}"' for variable, label in CLUSTER_VARIABLES.items())
CHOSEN = f'run=~"$run",{_PLACE}'


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard.

    Attributes:
        unit: as Grafana names it.
        queries: expressions, each with the text of its legend.
        stacked: values add up to something.
        most: upper end of the axis; None: as the data has it.
    """

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    most: float | None = None


def _of(title: str, unit: str, *metrics: Metric, label: str = "", **look: Any) -> Panel:
    """Gauges as they are: a line a run and, if a label is given, a value of that label."""
    labels = (label,) if label else ()
    legend = f"{{{{run}}}} {{{{{label}}}}}" if label else "{{run}}"
    queries = tuple((latest(metric, CHOSEN, *labels), legend) for metric in metrics)
    return Panel(title, " ".join(metric.help for metric in metrics), unit, queries, **look)


def _panels() -> dict[str, list[Panel]]:
    """Heading of each row, and its panels."""
    age = f"time() - {latest(m.STEP_TIMESTAMP, CHOSEN)}"
    return {
        "Now": [
            _of("Step", "none", m.STEP, kind="stat"),
            _of("Held-out solve rate", "percentunit", m.PASS_AT_1, kind="stat"),
            Panel("Since the last step", "Seconds since a step was finished.", "s", ((age, "{{run}}"),), "stat"),
        ],
        "Does it learn?": [
            _of("Solve rate of training episodes", "percentunit", m.SOLVE_RATE, most=1),
            Panel(
                "Solve rate of evaluations",
                m.EVAL.help + " Held-out mazes never occur in training.",
                "percentunit",
                ((latest(m.EVAL, CHOSEN, "suite", "mode"), "{{run}} {{suite}} {{mode}}"),),
                most=1,
            ),
            _of("Reward", "none", m.REWARD),
            Panel(
                "How episodes ended, last hour",
                m.EPISODES.help,
                "none",
                ((f"sum {by('reason')} (increase({series(m.EPISODES, CHOSEN)}[1h]))", "{{run}} {{reason}}"),),
                stacked=True,
            ),
            _of("Groups with and without signal", "none", m.GROUPS, label="signal"),
            _of("Advantages", "none", m.ADVANTAGE, label="statistic"),
        ],
        "Is the update sound?": [
            _of("Entropy (nats)", "none", m.ENTROPY),
            _of("KL (nats)", "none", m.KL, label="reference"),
            _of("Log-probability gap, engine to trainer (nats)", "none", m.LOGPROB_GAP, label="statistic"),
            _of("Gradient norm", "none", m.GRAD_NORM),
            _of("Loss", "none", m.LOSS),
            _of("Clipped tokens", "percentunit", m.CLIPPED),
        ],
        "Where does the time go?": [
            _of("Parts of a step", "s", m.PHASE_SECONDS, label="phase", stacked=True),
            _of("Step", "s", m.STEP_SECONDS),
            _of("Tokens a second, in a step", "none", m.TOKENS_RATE),
            _of("Engines' queue", "none", m.QUEUE, label="state", stacked=True),
            Panel(
                "Tokens, last hour",
                f"{m.TOKENS.help} {m.SAMPLED.help}",
                "short",
                tuple(
                    (f"sum {by()} (increase({series(metric, CHOSEN)}[1h]))", f"{{{{run}}}} {name}")
                    for metric, name in ((m.TOKENS, "all"), (m.SAMPLED, "sampled"))
                ),
            ),
        ],
        "Does it fit?": [
            _of("Storage of the run, free", "bytes", m.STORAGE_FREE),
            Panel(
                "Disks of the machines, used",
                "Share of each machine's own disk; Ray starts no work on a machine above 95 %.",
                "percentunit",
                (
                    (
                        f"{NODE_USED}{{{_PLACE}}} / ({NODE_USED}{{{_PLACE}}} + {NODE_FREE}{{{_PLACE}}})",
                        "{{instance}}",
                    ),
                ),
                most=1,
            ),
            _of("Memory of the driver, peak", "bytes", m.MEMORY),
        ],
    }


def dashboard() -> dict[str, Any]:
    """The dashboard; its variables choose cluster and run."""
    return {
        "uid": UID,
        "title": "Clew: training",
        "tags": ["clew"],
        "description": "Reinforcement learning with Clew. Ray's own dashboards show machines, actors and tasks.",
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "templating": {"list": list(_variables())},
        "annotations": {"list": []},
        "links": [{"title": "Ray", "type": "dashboards", "tags": [RAY_TAG], "asDropdown": True, "includeVars": True}],
        "panels": list(_laid_out(_panels())),
    }


def expressions() -> list[str]:
    """Every expression of the dashboard."""
    return [query for panels in _panels().values() for panel in panels for query, _ in panel.queries]


def variable(name: str, label: str, of: str) -> dict[str, Any]:
    """A variable whose values are those of a label of some series; All stands for what lacks the label, too."""
    query = f"label_values({of})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,  # whenever the time range changes: new runs appear
        "sort": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
    step = m.STEP.exported
    yield variable("cluster_name", "HyperPod cluster", f"{step}, cluster_name")
    yield variable("namespace", "Namespace", f"{step}, namespace")
    yield variable("Cluster", "Ray cluster", f"{step}, ray_io_cluster")
    yield variable("run", "Run", f"{step}{{{_PLACE}}}, run")


def _laid_out(rows: dict[str, list[Panel]]) -> Iterator[dict[str, Any]]:
    """Headings and panels with their places, three panels a line."""
    number, y = 1, 0
    for title, panels in rows.items():
        yield {"id": number, "type": "row", "title": title, "gridPos": _place(0, y, 24, 1), "panels": []}
        number, y = number + 1, y + 1
        height = 4 if panels[0].kind == "stat" else _HEIGHT
        for index, panel in enumerate(panels):
            line, column = divmod(index, 24 // _WIDTH)
            yield _drawn(panel, number, _place(column * _WIDTH, y + line * height, _WIDTH, height))
            number += 1
        y += -(-len(panels) // (24 // _WIDTH)) * height


def _drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "color": {"mode": "palette-classic"}}
    options: dict[str, Any] = {"colorMode": "value", "reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "timeseries":
        options = {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        defaults["custom"] = {
            "lineWidth": 2,
            "fillOpacity": 30 if panel.stacked else 0,
            "spanNulls": True,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
    if panel.most is not None:
        defaults |= {"min": 0, "max": panel.most}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": _SOURCE, "expr": expr, "legendFormat": legend, "range": True}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}
