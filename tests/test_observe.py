"""What Prometheus and Grafana are given: names, rules and dashboards, against Prometheus itself and a real run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Command, finish_clew, start_clew

from clew.observe import metrics as m
from clew.observe.alerts import ALERTS, NODE_FREE, NODE_USED
from clew.observe.dashboard import dashboard, expressions
from clew.observe.files import DISCOVERY, prometheus_config, ray_dashboards, write_dashboards

NAMES = {metric.exported for metric in m.METRICS} | {NODE_FREE, NODE_USED}
LABELS = {"ray_io_cluster"}


def program(name: str) -> str:
    """A program of Debian's package prometheus."""
    if (found := shutil.which(name)) is None:
        pytest.skip(f"{name} is not on PATH (scripts/setup_prometheus.sh, or apt-get install prometheus)")
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_names_follow_prometheus() -> None:
    names = [metric.name for metric in m.METRICS]
    assert len(set(names)) == len(names)
    for metric in m.METRICS:
        assert re.fullmatch(r"clew_[a-z0-9]+(_[a-z0-9]+)*", metric.name), metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert not re.search(r"_(s|ms|gb|mb|percent)$", metric.name), metric.name
        assert metric.help.endswith("."), metric.name
        assert len({tuple(labels) for labels in metric.keys.values()}) <= 1, "the same labels on every series"
        assert not (metric.keys and metric.labels), metric.name


def test_all_numbers_of_a_run_are_shown(finished_run: Path) -> None:
    metrics, timing = lines(finished_run / "metrics.jsonl"), lines(finished_run / "timing.jsonl")
    keys = {key for line in metrics for key, value in line.items() if not isinstance(value, str)}
    keys |= {f"timing/{key}" for line in timing for key in line if key != "step"}
    assert {key for key in keys if m.find(key) is None} == {"step"}
    assert {key for metric in m.METRICS for key in metric.keys} <= keys, "nothing is listed that no run has"
    values = {"eval/maze/easy/greedy/solve_rate": 0.5, "rollout/stop/turn_cap": 3.0, "timing/sync_s": 0.1, "new": 1.0}
    assert [(metric.name, labels, value) for metric, labels, value in m.shown(values)] == [
        ("clew_eval_solve_rate", {"suite": "maze/easy", "mode": "greedy"}, 0.5),
        ("clew_episodes_total", {"reason": "turn_cap"}, 3.0),
        ("clew_phase_seconds", {"phase": "sync"}, 0.1),
    ]


def test_dashboard_and_rules_know_only_what_exists() -> None:
    for expression in [*expressions(), *(alert.expression for alert in ALERTS)]:
        named = set(re.findall(r"\bray_\w+", expression)) - LABELS
        assert named and named <= NAMES, expression
    text = (ROOT / "docs" / "observe.md").read_text()
    assert set(re.findall(r"\bray_clew_\w+", text)) <= NAMES
    assert {alert.name for alert in ALERTS} == set(re.findall(r"`(Clew\w+)`", text))


def test_dashboard_is_laid_out() -> None:
    made = dashboard()
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"], panel["title"]
    variables = {variable["name"] for variable in made["templating"]["list"]}
    assert variables == {"datasource", "cluster_name", "namespace", "Cluster", "run"}
    used = set(re.findall(r"\$(\w+)", " ".join(expressions())))
    assert used == variables - {"datasource"}


def test_the_command_writes_what_grafana_and_prometheus_load(clew: Command, tmp_path: Path) -> None:
    outcome = clew("cluster", "dashboards", "made")
    assert outcome.code == 0, outcome
    folder = tmp_path / "made"
    assert sorted(map(Path, outcome.out.split())) == sorted(path for path in folder.rglob("*") if path.is_file())
    shown = folder / "grafana" / "dashboards"
    assert sorted(path.stem for path in shown.iterdir()) == ["clew", "ray-core", "ray-data", "ray-serve", "ray-train"]
    uids = {json.loads(path.read_text())["uid"] for path in shown.iterdir()}
    assert len(uids) == 5
    (provider,) = yaml.safe_load((folder / "grafana/provisioning/dashboards/clew.yml").read_text())["providers"]
    assert provider["options"]["path"] == str(shown)
    (source,) = yaml.safe_load((folder / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    (tmp_path / "file").write_text("")
    refused = clew("cluster", "dashboards", "file")
    assert refused.code == 2 and "file is a file: name a folder" in refused.err


def test_rays_dashboards_choose_clusters_as_clews_does() -> None:
    before = dict(os.environ)
    for name, content in ray_dashboards().items():
        variables = [variable["name"] for variable in content["templating"]["list"]]
        assert len(set(variables)) == len(variables), name
        assert {"datasource", "cluster_name", "namespace", "Cluster"} <= set(variables), name
        queries = [target["expr"] for panel in flat(content["panels"]) for target in panel.get("targets", [])]
        chosen = [query for query in queries if 'cluster_name=~"$cluster_name",namespace=~"$namespace"' in query]
        assert len(chosen) > 0.9 * len(queries) > 0, name
        assert not [query for query in queries if "{{" in query], name
    assert dict(os.environ) == before


def flat(panels: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for panel in panels:
        yield panel
        yield from flat(panel.get("panels", []))


def test_promtool_accepts_what_is_written(tmp_path: Path) -> None:
    promtool = program("promtool")
    write_dashboards(tmp_path)
    for check in (("rules", "clew.rules.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(
            [promtool, "check", check[0], tmp_path / "prometheus" / check[1]], capture_output=True, text=True
        )
        assert done.returncode == 0, done
        assert "5 rules found" in done.stdout


def test_promtool_finds_the_names_in_order() -> None:
    page = "".join(
        f"# HELP {metric.exported} {metric.help}\n# TYPE {metric.exported} {metric.kind}\n{metric.exported} 1\n"
        for metric in m.METRICS
    )
    done = subprocess.run([program("promtool"), "check", "metrics"], input=page, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Hours of a run, a sample a minute, in promtool's notation: value + step x times. Each alert, when it fires in them.
STEADY = {
    'ray_clew_step_timestamp_seconds{run="a"}': "0+60x600",
    'ray_clew_step_seconds{run="a"}': "60x600",
    'ray_clew_train_solve_rate{run="a"}': "0.3+0.001x600",
    'ray_clew_policy_logprob_gap_nats{run="a",statistic="mean"}': "0.01x600",
    'ray_clew_policy_logprob_gap_nats{run="a",statistic="max"}': "3x600",
    'ray_clew_storage_free_bytes{run="a"}': "500x600",
    'ray_clew_storage_size_bytes{run="a"}': "1000x600",
    'ray_node_disk_free{instance="n"}': "300x600",
    'ray_node_disk_usage{instance="n"}': "700x600",
}
TROUBLE = {  # what happens to the steady run -> what fires at 5 h, and not at 2 h
    "ClewStepStalled": {'ray_clew_step_timestamp_seconds{run="a"}': "0+60x270 16200x330"},
    "ClewSolveRateFalling": {'ray_clew_train_solve_rate{run="a"}': "0.3+0.002x200 0.7-0.005x400"},
    "ClewLogprobGap": {'ray_clew_policy_logprob_gap_nats{run="a",statistic="mean"}': "0.01x200 0.2x400"},
    "ClewStorageNearlyFull": {'ray_clew_storage_free_bytes{run="a"}': "500-1.5x600"},
    "ClewNodeDiskNearlyFull": {
        'ray_node_disk_free{instance="n"}': "300-0.8x600",
        'ray_node_disk_usage{instance="n"}': "700+0.8x600",
    },
    "": {'ray_clew_step_seconds{run="a"}': "_x200 60x400"},  # the first step takes three hours; it was evaluated before
}


def test_alerts_fire_in_trouble_and_only_then(tmp_path: Path) -> None:
    promtool = program("promtool")
    write_dashboards(tmp_path)
    tests = []
    for trouble, series in TROUBLE.items():
        checks = []
        for alert in ALERTS:
            labels = {"severity": alert.severity} | (
                {"instance": "n"} if alert.name == "ClewNodeDiskNearlyFull" else {"run": "a"}
            )
            for hour in ("2h", "5h"):
                fires = alert.name == trouble and hour == "5h"
                sample = {"alertname": alert.name, "alertstate": "firing", **labels}
                text = ",".join(f'{key}="{value}"' for key, value in sample.items())
                checks.append(
                    {
                        "expr": f'ALERTS{{alertname="{alert.name}",alertstate="firing"}}',
                        "eval_time": hour,
                        "exp_samples": [{"labels": f"ALERTS{{{text}}}", "value": 1}] if fires else [],
                    }
                )
        tests.append(
            {
                "name": trouble or "a slow beginning",
                "interval": "1m",
                "input_series": [{"series": s, "values": v} for s, v in (STEADY | series).items()],
                "promql_expr_test": checks,
            }
        )
    script = {"rule_files": ["clew.rules.yml"], "evaluation_interval": "1m", "tests": tests}
    path = tmp_path / "prometheus" / "tests.yml"
    path.write_text(yaml.safe_dump(script, sort_keys=False))
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, cwd=path.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def ray_head(folder: Path) -> Iterator[tuple[str, Path]]:
    """A cluster of one machine, which lists what to scrape; its address and that list."""
    from ray.cluster_utils import Cluster

    variables = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "RAY_metrics_report_interval_ms": "1000"}
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        for name, value in variables.items():
            patch.setenv(name, value)
        head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": free_port()}
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield made.address, Path(made.head_node.get_session_dir_path()) / Path(DISCOVERY).name
        finally:
            made.shutdown()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """A Prometheus with the configuration of a folder; its address."""
    url = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={url}",
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, "GOMAXPROCS": "1"},
        )
        try:
            yield f"http://{url}"
        finally:
            process.terminate()
            process.wait(30)


def ask(url: str, path: str, **parameters: str | float) -> Any:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
        return json.load(answer)["data"]


def without_variables(expression: str) -> str:
    """As Grafana asks when every variable is All."""
    return re.sub(r"\$\w+", ".*", expression)


@pytest.mark.slow
def test_every_expression_has_data_of_a_real_run(small_recipe: Path, tmp_path: Path) -> None:
    program("prometheus")
    write_dashboards(tmp_path)
    folder = tmp_path / "prometheus"
    with ray_head(tmp_path) as (address, discovery):
        (folder / "prometheus.yml").write_text(yaml.safe_dump(prometheus_config(str(discovery), "1s")))
        with prometheus(folder) as url:
            began = time.time()
            run = start_clew(
                "train",
                small_recipe,
                "--run",
                tmp_path / "watched",
                "runtime.kind=ray",
                f"runtime.address={address}",
                "training.steps=2",
            )
            outcome = finish_clew(run)
            assert outcome.code == 0, outcome
            wanted = [*map(without_variables, expressions()), *(alert.value for alert in ALERTS)]
            until = time.monotonic() + 90  # a minute for the subquery of a rule, which is asked at whole minutes
            while missing := [e for e in wanted if not has_data(url, e, began)]:
                assert time.monotonic() < until, missing
                time.sleep(2)
            assert has_data(url, 'ray_clew_step{run="watched"} == 2', began)
            (group,) = ask(url, "rules")["groups"]
            assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(ALERTS)
            episodes = 'sum(ray_clew_episodes_total{run="watched"})'
            assert has_data(url, f"{episodes} == 24", began), "two steps of twelve"
            # What they say while episodes are played is test_ray_fleet.py's: a look a second may fall between batches.
            for state in ("waiting", "playing"):
                assert has_data(url, f'ray_clew_engine_queue_episodes{{run="watched", state="{state}"}}', began)


def has_data(url: str, expression: str, since: float) -> bool:
    """Whether it had a value at any second."""
    answer = ask(url, "query_range", query=expression, start=since, end=time.time(), step=1)
    return any(value not in ("NaN", "") for series in answer["result"] for _, value in series["values"])
