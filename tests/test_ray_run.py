"""Whole runs on a local Ray cluster, by the command line, in processes that are really killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, finish_clew, start_clew
from processes import alive, descendants, listening

RAY = ["runtime.kind=ray", "runtime.threads=1"]
TWO = [*RAY, "runtime.workers_per_node=2", "runtime.engines=2"]


def lines(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir) if line["step"]]


def train(recipe: Path, run_dir: Path, *overrides: str) -> Outcome:
    return finish_clew(start_clew("train", recipe, "--run", run_dir, *overrides))


def wait_until(condition: Any, process: subprocess.Popen[str], timeout: float = 400) -> Any:
    """Polls until there is something, as long as the process lives."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        try:
            if found := condition():
                return found
        except (OSError, ValueError):
            pass  # not written yet
        assert process.poll() is None, finish_clew(process)
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"nothing came within {timeout} s: {finish_clew(process)}")


def workers(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    return json.loads((run_dir / "workers.json").read_text())


def assert_finished(run_dir: Path) -> None:
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 4
    assert [line["step"] for line in steps(run_dir)] == [1, 2, 3, 4]
    assert all(line["train/episodes"] == 12 for line in steps(run_dir)), "no episode is lost"


def close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The same run up to the rounding of float32: the same episodes, loss and gradient to five digits."""
    for a, b in zip(found, expected, strict=True):
        assert a["train/solved"] == b["train/solved"] and a["rollout/tokens_total"] == b["rollout/tokens_total"]
        for key in ("train/loss", "train/grad_norm", "policy/entropy"):
            assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-7), key  # a loss near 0 is a difference of sums


def test_one_worker_and_one_engine_do_what_one_process_does(
    small_recipe: Path, finished_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    outcome = train(small_recipe, run_dir, *RAY)
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    close(steps(run_dir), steps(finished_run))
    assert_finished(run_dir)
    # An adapter version holds step, start and content; the engines say which sampled each step.
    versions = [line["policy/version"] for line in steps(run_dir)]
    assert [re.fullmatch(r"step-00000(\d)-a1-[0-9a-f]{8}", v)[1] for v in versions] == ["0", "1", "2", "3"]  # type: ignore[index]
    assert [path.name for path in (run_dir / "sync").iterdir() if path.name in versions] == [], "pruned"
    assert len(list((run_dir / "sync").iterdir())) <= 2
    assert all(0 < line["sync_s"] < line["step_s"] for line in lines(run_dir, "timing.jsonl"))
    assert not any(alive(w["pid"]) for part in workers(run_dir).values() for w in part), "workers end with the run"


@pytest.mark.slow
def test_a_run_changes_its_number_of_workers_and_its_runtime(
    small_recipe: Path, finished_run: Path, tmp_path: Path
) -> None:
    """One step on each: 2 ranks, this process, 3 ranks, 1 rank. It stays the run that one process makes."""
    run_dir, model = tmp_path / "run", finished_run
    three = [*RAY, "runtime.workers_per_node=3", "runtime.engines=1"]
    for step, overrides in enumerate((TWO, [], three, RAY), 1):
        outcome = train(small_recipe, run_dir, f"training.steps={step}", *overrides)
        assert outcome.code == 0 and len(steps(run_dir)) == step, outcome
    close(steps(run_dir), steps(model))
    assert_finished(run_dir)


@pytest.mark.slow
def test_engines_and_the_driver_die_and_the_run_goes_on(small_recipe: Path, finished_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_clew("train", small_recipe, "--run", run_dir, *TWO)
    wait_until(lambda: len(steps(run_dir)) >= 1, process)
    ranks = {worker["pid"] for worker in workers(run_dir)["policy"]}  # torch.distributed's own listen everywhere
    sockets = list(listening({process.pid, *descendants(process.pid)} - ranks))
    assert len(sockets) > 5 and all(only_here for only_here, _ in sockets), "its Ray is nobody else's"
    pids = [worker["pid"] for worker in workers(run_dir)["engines"]]
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: workers(run_dir)["engines"][0]["pid"] != pids[0], process)
    everyone = [w["pid"] for part in workers(run_dir).values() for w in part]
    process.kill()
    killed = finish_clew(process)
    assert "engine 0 died (" in killed.out
    until = time.monotonic() + 60
    while any(map(alive, everyone)):
        assert time.monotonic() < until, "workers outlive their driver"
        time.sleep(0.2)
    outcome = train(small_recipe, run_dir, *TWO)
    assert outcome.code == 0, outcome
    assert "going on after step" in outcome.out
    close(steps(run_dir), steps(finished_run))
    assert_finished(run_dir)


@pytest.mark.slow
def test_a_dead_policy_worker_stops_the_run_and_the_same_command_goes_on(
    small_recipe: Path, finished_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start_clew("train", small_recipe, "--run", run_dir, *TWO)
    wait_until(lambda: len(steps(run_dir)) >= 2, process)
    os.kill(workers(run_dir)["policy"][1]["pid"], signal.SIGKILL)
    began = time.monotonic()
    outcome = finish_clew(process)
    assert time.monotonic() - began < 120, "nobody waits for the dead"
    assert outcome.code == 1, outcome
    (line,) = outcome.err.splitlines()
    assert line.startswith("clew: failed: policy worker 1 of 2 died ") and "to go on: clew train" in line
    assert "Traceback" not in outcome.err + outcome.out
    outcome = train(small_recipe, run_dir, *TWO)
    assert outcome.code == 0, outcome
    close(steps(run_dir), steps(finished_run))
    assert_finished(run_dir)


@pytest.fixture
def two_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head that takes no work, and two machines that do, started in another folder than the run."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    with contextlib.chdir(tmp_path_factory.mktemp("elsewhere")):
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.mark.slow
def test_workers_spread_over_machines_and_metrics_reach_prometheus(
    two_machines: Any, small_recipe: Path, finished_run: Path, tmp_path: Path
) -> None:
    run_dir = Path(os.path.relpath(tmp_path / "run"))
    spread = [*RAY, f"runtime.address={two_machines.address}", "runtime.nodes=2", "runtime.engines=2"]
    process = start_clew("train", small_recipe, "--run", run_dir, *spread)
    wait_until(lambda: len(steps(run_dir)) >= 2, process)
    placed = workers(run_dir)
    ports = [node.metrics_export_port for node in two_machines.list_all_nodes()]

    def exported() -> str:
        pages = []
        for port in ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                pages.append(answer.read().decode())
        return next(iter(re.findall(r"^ray_clew_train_solve_rate\{.*\} \S+$", "\n".join(pages), re.M)), "")

    line = wait_until(exported, process)
    assert 'run="run"' in line and 0 <= float(line.split()[-1]) <= 1
    outcome = finish_clew(process)
    assert outcome.code == 0, outcome
    head = two_machines.head_node.node_id
    for part in ("policy", "engines"):
        nodes = {worker["node"] for worker in placed[part]}
        assert len(nodes) == 2 and head not in nodes
    close(steps(run_dir), steps(finished_run))
    assert_finished(run_dir)


def test_bad_clusters_are_named(small_recipe: Path, tmp_path: Path) -> None:
    outcome = train(small_recipe, tmp_path / "a", *RAY, "runtime.address=127.0.0.1:1")
    assert outcome.code == 2 and "runtime.address: there is no Ray cluster at 127.0.0.1:1" in outcome.err, outcome
    outcome = train(small_recipe, tmp_path / "b", *RAY, "runtime.nodes=3", "runtime.engines=3")
    assert outcome.code == 2 and "runtime.nodes = 3 but the Ray cluster has 1" in outcome.err, outcome
    outcome = train(small_recipe, tmp_path / "c", *RAY, "model.device=cuda")
    assert outcome.code == 2 and "[runtime] places work on 1 GPUs of each of 1 machines, but" in outcome.err, outcome
    assert "Traceback" not in outcome.err
