"""All that a Grafana and a Prometheus need to show Ray clusters that train with Clew, as files of a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from clew.checkpoint import write_file_atomic
from clew.errors import UserError
from clew.observe.alerts import rule_file
from clew.observe.dashboard import CLUSTER_VARIABLES, RAY_TAG, dashboard, variable

DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"
"""Where the head of a Ray cluster keeps the list of what to scrape (below ``ray start --temp-dir``, if given)."""
_NODES = "ray_node_network_receive_speed"  # the series that Ray's own variables are read from


def write_dashboards(folder: Path) -> list[Path]:
    """Writes dashboards, provisioning files, Prometheus's configuration and alert rules; returns their paths.

    Raises:
        UserError: Ray is missing, or the folder can't be written to.
    """
    folder = Path(os.path.abspath(folder))
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder for the dashboards")
    written = []
    for name, text in _files(folder):
        written.append(folder / name)
        write_file_atomic(written[-1], text)
    return written


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    for name, content in {"clew": dashboard(), **ray_dashboards()}.items():
        yield f"grafana/dashboards/{name}.json", json.dumps(content, indent=2) + "\n"
    yield (
        "grafana/provisioning/dashboards/clew.yml",
        _yaml(
            "Grafana shows the dashboards of this folder, and sees it when they change.",
            {
                "apiVersion": 1,
                "providers": [
                    {
                        "name": "clew",
                        "folder": "Clew",
                        "type": "file",
                        "options": {"path": str(folder / "grafana" / "dashboards")},
                    }
                ],
            },
        ),
    )
    yield (
        "grafana/provisioning/datasources/prometheus.yml",
        _yaml(
            "Where Grafana asks: the Prometheus that scrapes the cluster.",
            {
                "apiVersion": 1,
                "datasources": [
                    {
                        "name": "Prometheus",
                        "type": "prometheus",
                        "access": "proxy",
                        "url": os.environ.get("RAY_PROMETHEUS_HOST", "http://localhost:9090"),
                        "isDefault": True,
                    }
                ],
            },
        ),
    )
    yield (
        "prometheus/prometheus.yml",
        _yaml(
            "For a Prometheus on the head of a Ray cluster; where an operator finds the pods, take the rules only.",
            prometheus_config(),
        ),
    )
    yield "prometheus/clew.rules.yml", _yaml("Alerts on runs of Clew.", rule_file())


def prometheus_config(discovery: str = DISCOVERY, interval: str = "10s") -> dict[str, Any]:
    """A Prometheus configuration that scrapes every node of a Ray cluster and evaluates the alert rules beside it."""
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": ["clew.rules.yml"],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [discovery]}]}],
    }


def ray_dashboards() -> dict[str, dict[str, Any]]:
    """Ray's own dashboards by file name, with variables for the labels that HyperPod's add-on gives.

    Raises:
        UserError: Ray is missing.
    """
    try:
        from ray.dashboard.modules.metrics import grafana_dashboard_factory as factory
    except ImportError as error:
        raise UserError('Ray renders its dashboards itself and is not installed: pip install "clew[ray]"') from error
    made = {
        "core": ("DEFAULT", factory.generate_default_grafana_dashboard),
        "data": ("DATA", factory.generate_data_grafana_dashboard),
        "train": ("TRAIN", factory.generate_train_grafana_dashboard),
        "serve": ("SERVE", factory.generate_serve_grafana_dashboard),
    }
    found = {}
    for name, (part, generate) in made.items():
        added = {"cluster_name": "HyperPod cluster", "namespace": "Namespace"}
        if name == "train":  # the others have it
            added["Cluster"] = "Ray cluster"
        filters = ",".join(f'{CLUSTER_VARIABLES[variable]}=~"${variable}"' for variable in added)
        with patch.dict(os.environ, {f"RAY_GRAFANA_{part}_DASHBOARD_GLOBAL_FILTERS": filters}):
            text, _ = generate()
        content = json.loads(text)
        content["tags"] = [*content.get("tags", []), RAY_TAG]
        content["title"] = f"Ray {name.capitalize()}"
        source, *others = content["templating"]["list"]
        content["templating"]["list"] = [
            source,
            *(variable(name, title, f"{_NODES}, {CLUSTER_VARIABLES[name]}") for name, title in added.items()),
            *others,
        ]
        found[f"ray-{name}"] = content
    return found


def _yaml(comment: str, content: dict[str, Any]) -> str:
    return f"# {comment}\n{yaml.safe_dump(content, sort_keys=False, width=118)}"
