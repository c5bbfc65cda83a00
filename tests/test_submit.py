"""`clew submit`, `status`, `logs` and `stop` against a real Ray head, with drivers and machines that really die."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command, contents, finish_clew, start_clew
from gateway import Gateway
from ray_head import RayHead, driver, ids, steps, wait_until

from clew.cloud import attempts
from clew.cloud.attempts import see_through
from clew.cloud.connection import Connection
from clew.cloud.jobs import Job, clew_jobs
from clew.errors import UserError


@pytest.fixture(scope="session")
def whole_run(quick_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by `clew train`, without a cluster and without interruption."""
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    outcome = finish_clew(start_clew("train", quick_recipe, "--run", run_dir))
    assert outcome.code == 0, outcome
    return run_dir


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses worth mentioning between attempts."""
    monkeypatch.setattr(attempts, "_PAUSE_S", 0.05)


class Told:
    """A connection of a test, what it was told, and the log it was given."""

    def __init__(self, address: str, folder: Path) -> None:
        self.said: list[str] = []
        self.log = ""
        self.folder = folder
        self.connection = Connection(address, self.said.append)

    def write(self, text: str) -> None:
        self.log += text

    def run(self, name: str, script: str, retries: int) -> None:
        """Sees a job through that runs a line of shell."""
        (self.folder / "working").mkdir(exist_ok=True)
        (self.folder / "working" / "x").touch()
        job = Job(name, str(self.folder / name), script, self.folder / "working", "digest")
        see_through(self.connection, job, retries, self.write, self.said.append)

    def jobs(self, name: str) -> list[Any]:
        return [job for job in clew_jobs(self.connection) if (job.submission_id or "").startswith(name)]


@pytest.fixture
def told(ray_head: RayHead, tmp_path: Path, quick: None) -> Told:
    return Told(ray_head.address, tmp_path)


# ---- how jobs end, by jobs that are lines of shell


def test_what_failed_is_submitted_again_under_a_new_id_until_it_is_finished(told: Told) -> None:
    mark = told.folder / "mark"
    told.run("again", f"if test -e {mark}; then echo 'step 2/2 solved'; else touch {mark}; kill -9 $$; fi", retries=3)
    jobs = told.jobs("again")
    assert [(job.status, job.driver_exit_code) for job in jobs] == [("FAILED", -9), ("SUCCEEDED", 0)]
    assert len({job.submission_id for job in jobs}) == 2 and [job.metadata["clew_attempt"] for job in jobs] == [*"12"]
    assert [line for line in told.log.splitlines() if line.startswith("step ")] == ["step 2/2 solved"]
    assert any("was ended by SIGKILL; submitting it again" in line for line in told.said), told.said


def test_bad_input_is_never_repeated(told: Told) -> None:
    """And is told, after a byte that is no UTF-8 too, at which Ray's own way to the log ends."""
    with pytest.raises(UserError, match="exit code 2: no such key"):
        told.run("never", r"printf 'odd \377\r\n'; echo 'clew: error: no such key'; exit 2", retries=5)
    assert len(told.jobs("never")) == 1 and "\nodd \ufffd\nclew: error: no such key\n" in told.log


def test_a_log_comes_whole_and_once_through_broken_connections(ray_head: RayHead, tmp_path: Path) -> None:
    proxy = Gateway(ray_head.address, tmp_path, tls=False)
    told = Told(proxy.url, tmp_path)
    stop = threading.Event()

    def disturb() -> None:
        for round in itertools.count():
            if stop.wait(0.5):
                return
            proxy.cut()
            proxy.open = round % 4 != 2  # now and then it is away altogether

    threading.Thread(target=disturb, daemon=True).start()
    try:
        # Lines in two halves, and letters of several bytes. Ray writes a line of its own as it starts the first.
        told.run("noisy", "sleep 0.5; for i in $(seq 20); do printf 'lïne '; sleep 0.2; echo $i; done", retries=0)
    finally:
        stop.set()
        proxy.close()
    assert [line for line in told.log.splitlines() if line.startswith("lïne")] == [f"lïne {i}" for i in range(1, 21)]
    assert any("does not answer (HTTP 503" in line for line in told.said), told.said
    assert len([request for request in proxy.requests if request.endswith("/tail")]) > 1


@pytest.mark.slow
def test_a_log_comes_without_websockets_too(ray_head: RayHead, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("no websockets here")

    monkeypatch.setattr("clew.cloud.ray_client.JobClient.tail_job_logs", refused)
    told.run("plain", "for i in 1 2 3; do echo line $i; sleep 1; done", retries=0)
    assert re.findall(r"^line (\d)$", told.log, re.M) == ["1", "2", "3"]


def test_the_address_decides_whatever_the_environment_says(
    ray_head: RayHead, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    assert told.jobs("nobody's") == []
    assert os.environ["RAY_ADDRESS"] == "http://127.0.0.1:9"


def test_what_is_no_dashboard_is_named(clew: Command, tmp_path: Path, ray_head: RayHead) -> None:
    proxy = Gateway(f"{ray_head.address}/nowhere", tmp_path, tls=False)
    outcome = clew("status", "--address", proxy.url)
    assert outcome.code == 2 and "what answers there is no Ray dashboard" in outcome.err, outcome
    assert len(outcome.err.splitlines()) == 1
    proxy.close()


# ---- whole runs

SHORT = ("evaluation.before_training=false", "evaluation.sight=false", "evaluation.confirm_size=4")


def submit(head: RayHead, recipe: Path, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    return start_clew("submit", recipe, "--address", head.address, "--run", run_dir, *arguments)


@pytest.mark.slow
def test_bad_input_that_only_the_cluster_knows(ray_head: RayHead, quick_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    outcome = finish_clew(submit(ray_head, quick_recipe, tmp_path / "run", "--retry", "3"))
    assert outcome.code == 2 and len(ids(outcome.out)) == 1, outcome
    (line,) = outcome.err.splitlines()
    assert line.startswith("clew: error: run-attempt-1-") and "is a file: name a folder" in line


def test_a_live_run_is_followed_by_whoever_submits_it_again_and_stops_when_asked(
    ray_head: RayHead, quick_recipe: Path, tmp_path: Path, clew: Command
) -> None:
    run_dir, address = tmp_path / "run", ("--address", ray_head.address)
    submitted = clew("submit", quick_recipe, *address, "--run", run_dir, "--no-follow", "training.steps=4000")
    (submission_id,) = ids(submitted.out)
    assert f"clew logs {submission_id} --follow" in submitted.out
    other = clew("submit", quick_recipe, *address, "--run", run_dir, "training.steps=4001")
    assert other.code == 2 and f"job {submission_id} is writing {run_dir} with another recipe" in other.err
    process = submit(ray_head, quick_recipe, run_dir, "--retry", "5", "training.steps=4000")
    wait_until(lambda: len(steps(run_dir)) >= 2, process)
    assert f"{submission_id}  running  " in clew("status", *address).out
    stopped = clew("stop", *address)
    assert stopped.code == 0 and f"{submission_id}: was stopped" in stopped.out, stopped
    outcome, done = finish_clew(process), len(steps(run_dir))
    assert outcome.code == 130 and not ids(outcome.out), outcome
    assert f"clew: stopped after step {done}; all of it is saved" in outcome.out
    assert f"{submission_id}: was stopped" in outcome.out
    assert (run_dir / "checkpoints" / f"step-{done:06d}" / "manifest.json").is_file(), "a stop saves first"
    again = clew("stop", submission_id, *address)
    assert again.code == 0 and "there is nothing to stop" in again.out
    assert clew("stop", *address).code == 2


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_alone(ray_head: RayHead, quick_recipe: Path, tmp_path: Path, clew: Command) -> None:
    run_dir = tmp_path / "run"
    process = submit(ray_head, quick_recipe, run_dir, "training.steps=3", *SHORT)
    wait_until(lambda: steps(run_dir), process)
    follower = start_clew("logs", "--follow", "--address", ray_head.address)  # the only live one
    assert follower.stdout is not None and follower.stdout.readline()
    for each in (process, follower):
        each.send_signal(signal.SIGINT)
    outcome, followed = finish_clew(process), finish_clew(follower)
    assert outcome.code == 130 and "the job goes on" in outcome.out and "Traceback" not in outcome.err, outcome
    assert followed.code == 130 and "Traceback" not in followed.err, followed
    (submission_id,) = ids(outcome.out)
    ended = clew("logs", submission_id, "--follow", "--address", ray_head.address)
    assert f"{submission_id}: finished" in ended.out


@pytest.mark.slow
def test_a_module_beside_the_recipe_is_there_on_the_cluster(ray_head: RayHead, tmp_path: Path) -> None:
    """The worked example's environment, in the driver and in Ray's workers, which know no PYTHONPATH of it."""
    pytest.importorskip("pygame")
    project = tmp_path / "project"
    project.mkdir()
    (project / "frozen_lake.py").write_text((ROOT / "examples" / "frozen_lake.py").read_text())
    text = (ROOT / "examples" / "frozen_lake.toml").read_text().replace("frozen-lake-warm-start", "package:warm-start")
    for old, new in (
        ("steps = 30", "steps = 1"),
        ("prompts_per_step = 16", "prompts_per_step = 2"),
        ("size = 64", "size = 4"),
    ):
        text = text.replace(old, new)
    text = text.replace("confirm_size = 256", "confirm_size = 4").replace("group_size = 8", "group_size = 2")
    (project / "lakes.toml").write_text(text.replace('kind = "local"', 'kind = "ray"\nthreads = 1'))
    outcome = finish_clew(submit(ray_head, project / "lakes.toml", tmp_path / "run", *SHORT))
    assert outcome.code == 0, outcome
    assert "working set: 3 files" in outcome.out and "frozen_lake.py" in outcome.out
    assert steps(tmp_path / "run") == [1]


# ---- machines that are lost


@pytest.fixture
def heads() -> Iterator[list[RayHead]]:
    """Heads of a test's own, taken down behind it."""
    made: list[RayHead] = []
    yield made
    for head in made:
        head.close()


@pytest.mark.slow
def test_a_lost_head_is_waited_for_and_the_run_goes_on(
    heads: list[RayHead], quick_recipe: Path, whole_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    heads.append(RayHead())
    process = submit(heads[0], quick_recipe, run_dir, "--retry", "2")
    wait_until(lambda: len(steps(run_dir)) >= 2, process)
    os.kill(driver(run_dir), signal.SIGKILL)  # a machine takes its driver with it
    heads[0].kill()
    time.sleep(3)
    heads.append(RayHead(port=heads[0].port))
    outcome = finish_clew(process)
    assert outcome.code == 0, outcome
    assert "does not answer" in outcome.out and "answers again" in outcome.out
    assert "was lost with its cluster" in outcome.out and len(ids(outcome.out)) == 2
    assert contents(run_dir) == contents(whole_run), "it is the run that one process makes without a cluster"


@pytest.mark.slow
def test_a_job_waits_for_a_machine_that_is_being_replaced(
    heads: list[RayHead], quick_recipe: Path, tmp_path: Path
) -> None:
    """As after the loss of a worker: the head is there, and one machine less than the run needs."""
    run_dir = tmp_path / "run"
    heads.append(RayHead(cpus=0))
    heads[0].join()
    arguments = ("runtime.kind=ray", "runtime.nodes=2", "runtime.engines=2", "training.steps=2", *SHORT)
    process = submit(heads[0], quick_recipe, run_dir, *arguments)
    out = []
    assert process.stdout is not None
    for line in process.stdout:
        out.append(line)
        if "1 of 2 machines are there; waiting for the rest, up to 30 min" in line:
            heads[0].join()
    assert process.wait() == 0, out
    assert steps(run_dir) == [1, 2]
