"""HyperPod's rules for hung jobs, by the real toolkit, posted to a listener that stands for a machine's job monitor."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import finish_clew, start_clew

from clew.observe import hung_jobs
from clew.observe.hung_jobs import HOST, post_rules, rules, step_line
from clew.recipe import load_recipe

LOOPBACK = "127.0.0.89"  # the port is fixed, the address need not be shared


def test_the_rules_fit_what_a_worker_prints_and_how_long_a_run_may_take() -> None:
    recipe = load_recipe("hyperpod")
    (rule,) = rules(recipe)
    assert rule["enabled"] is True, "off by default"
    assert len(rule["log_pattern"]) <= 256
    assert all(re.search(rule["log_pattern"], step_line(step)) for step in (1, 16, 160))
    stop = [step for step in range(1, 161) if re.search(rule["stop_pattern"], step_line(step))]
    assert stop == [160], "what comes after the last step prints no more of them"
    assert rule["timeout_minutes"] * 60 > recipe.rollout.deadline_s
    assert rule["start_timeout_minutes"] > rule["timeout_minutes"]
    assert isinstance(rule["timeout_minutes"], int)


def test_elsewhere_nothing_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST, raising=False)
    assert post_rules(load_recipe("hyperpod")) is None
    monkeypatch.setenv(HOST, LOOPBACK)
    monkeypatch.setattr(hung_jobs, "find_spec", lambda name: None)
    said = post_rules(load_recipe("hyperpod"))
    assert said is not None and "the toolkit is missing" in said


class Monitor(HTTPServer):
    """Takes rules down; answers with ``status``."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.status = 200
        super().__init__((LOOPBACK, 8889), Handler)
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Monitor

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append((self.path, body))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b'{"error": "no such action"}')

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    pytest.importorskip("toolkit_for_ray_on_sagemaker_ai", reason="the extra aws")
    monkeypatch.setenv(HOST, LOOPBACK)
    server = Monitor()
    yield server
    server.shutdown()
    server.server_close()


def test_a_failure_to_post_is_a_warning(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    client = "toolkit_for_ray_on_sagemaker_ai.log_monitoring._client"
    for name in ("_get_job_id", "_get_worker_id"):  # what a worker of Ray's would know
        monkeypatch.setattr(f"{client}.{name}", lambda: "01000000")
    monitor.status = 400
    assert post_rules(load_recipe("hyperpod")) == "warning: hung jobs are not watched for (no such action)"
    monitor.status = 200
    said = post_rules(load_recipe("hyperpod"))
    assert said == "hung jobs: the machine's monitor reports when no step ends for 120 min"
    assert len(monitor.posted) == 2

    def broken() -> str:
        raise SystemError("no Ray here")

    monkeypatch.setattr(f"{client}._get_job_id", broken)
    said = post_rules(load_recipe("hyperpod"))
    assert said is not None and said.startswith("warning: ") and "no Ray here" in said


@pytest.mark.slow
def test_the_first_policy_worker_of_a_machine_is_watched(monitor: Monitor, quick_recipe: Path, tmp_path: Path) -> None:
    ray = ["runtime.kind=ray", "runtime.workers_per_node=2", "training.steps=2", "evaluation.before_training=false"]
    outcome = finish_clew(start_clew("train", quick_recipe, "--run", tmp_path / "run", *ray))
    assert outcome.code == 0, outcome
    ((path, body),) = monitor.posted  # one of the machine's two workers
    assert path == "/configure-hang-detection-rules"
    assert body["rules_content"]["enabled"] is True
    assert body["rules_content"]["action_policy"] == {"action": "notify"}
    (rule,) = body["rules_content"]["rules"]
    assert rule["name"] == "clew_training_step" and rule["stop_pattern"] == "step 2 trained$"
    assert re.fullmatch(r"[0-9a-f]{8}", body["job_id"]) and re.fullmatch(r"[0-9a-f]{56}", body["worker_id"])
    assert "hung jobs: the machine's monitor reports when no step ends for 60 min" in outcome.out
    # The ids are those of the file that Ray keeps the worker's output in: the one that is watched.
    (log,) = Path("/tmp/ray").glob(f"session_[0-9]*/logs/worker-{body['worker_id']}-{body['job_id']}-*.out")
    assert re.findall(r"^step \d trained$", log.read_text(), re.M) == [step_line(1), step_line(2)]
