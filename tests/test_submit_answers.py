"""What `clew submit` makes of the answers it gets, by a server that stands for whatever answers at an address."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.job_submission import JobDetails, JobType

from clew.cloud import attempts, connection
from clew.cloud.attempts import Stopped, see_through
from clew.cloud.connection import Connection
from clew.cloud.jobs import Job, chosen, clew_jobs, details
from clew.cloud.ray_client import NoDashboard, Unreachable, _understood
from clew.errors import RunFailed, UserError
from clew.recipe import load_recipe
from clew.runtime import cluster as ray_cluster

PAGE = ("text/html", "<html><body>404 page not found</body></html>")


class Answers(ThreadingHTTPServer):
    """A dashboard that says its version, and of jobs what it is told to: (status, content type, text) each."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str, str]] = []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_GET(self) -> None:
        version = json.dumps({"version": "4", "ray_version": "2.60.0", "ray_commit": "", "session_name": ""})
        status, kind, text = (200, "application/json", version)
        if self.path != "/api/version":
            status, kind, text = self.server.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(connection, "_PAUSE_S", 0.01)
    made = Answers()
    yield made
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((404, *PAGE), "HTTP 404"),  # of an ingress whose service is away
        ((200, *PAGE), "no Ray dashboard"),  # of a gateway that shows something else meanwhile
        ((429, "text/plain", "slow down"), "HTTP 429 slow down"),
        ((405, "text/plain", ""), "HTTP 405"),
        ((502, *PAGE), "HTTP 502"),
    ],
)
@pytest.mark.parametrize("question", [clew_jobs, lambda *a: details(a[0], "maze-1", *a[1:])], ids=["list", "one"])
def test_what_a_gateway_says_of_a_cluster_that_is_away_is_no_word_of_the_job(
    server: Answers, question: Callable[..., Any], answer: tuple[int, str, str], said: str
) -> None:
    notes: list[str] = []
    asked = Connection(server.url, notes.append)
    server.answers = [answer, answer, (404, "text/plain", "Job maze-1 does not exist")]
    if question is clew_jobs:
        server.answers[-1] = (200, "application/json", "[]")
    assert not question(asked, 60.0), "waited for, until the cluster itself answered"
    assert said in notes[0] and notes[-1].endswith("answers again")
    server.answers = [answer]
    with pytest.raises(Unreachable):
        question(asked)


def test_what_the_toolkit_says_of_a_cluster_that_is_being_made_anew_is_waited_for() -> None:
    class TokenAcquisitionError(Exception):
        __module__ = "toolkit_for_ray_on_sagemaker_ai.job_submission"

    for text in (
        "Resource not found for cluster 'maze' in namespace 'a'. Verify the cluster name and namespace are correct.",
        "RayDashboardConnection response does not contain a connection URL. The public endpoint may not be enabled.",
        "Failed to create RayDashboardConnection (HTTP 429): slow down",
        "Credential plugin failed (exit code 255): Could not connect to the endpoint URL",
    ):
        made = _understood(TokenAcquisitionError(text), "sagemaker_ray://maze/a")
        assert isinstance(made, Unreachable) and not isinstance(made, NoDashboard), text
    made = _understood(TokenAcquisitionError("Access denied: you are not authorized"), "sagemaker_ray://maze/a")
    assert isinstance(made, UserError)


def test_a_driver_that_nobody_submitted_is_no_job(server: Answers) -> None:
    """Ray knows it by a number, and has no log of it."""
    found = {"type": "DRIVER", "job_id": "01000000", "status": "RUNNING", "entrypoint": "python"}
    server.answers = [(200, "application/json", json.dumps(found)), (200, "application/json", "[]")]
    with pytest.raises(UserError, match="there is no job 01000000"):
        chosen(Connection(server.url, print), "01000000")


# ---- what becomes of a job


def job(submission_id: str, status: str, code: int | None = None, recipe: str = "digest") -> JobDetails:
    metadata = {"clew": "0", "clew_run": "/run", "clew_recipe": recipe, "clew_attempt": "1"}
    return JobDetails(
        type=JobType.SUBMISSION,
        submission_id=submission_id,
        status=status,
        entrypoint="x",
        driver_exit_code=code,
        metadata=metadata,
    )


class Script:
    """A cluster as a list: what each look at the run's jobs shows, and how each job that is followed ends.

    What a job says last may come with its end.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, looks: list[list[JobDetails]], ends: list[JobDetails], *logs: str
    ) -> None:
        self.followed: list[str] = []
        self.submitted: list[str] = []
        self.said: list[str] = []

        def follow(_: Any, submission_id: str, write: Callable[[str], None], *rest: Any) -> JobDetails:
            write("".join(logs[len(self.followed) : len(self.followed) + 1]))
            self.followed.append(submission_id)
            return ends.pop(0)

        monkeypatch.setattr(attempts, "follow", follow)
        monkeypatch.setattr(attempts, "clew_jobs", lambda *_: looks.pop(0))
        monkeypatch.setattr(attempts, "submit", lambda _, made, name, *rest: self.submitted.append(name))
        monkeypatch.setattr(attempts, "_PAUSE_S", 0.0)

    def run(self, retries: int) -> None:
        made = Job("maze", "/run", "x", Path("/nowhere"), "digest")
        see_through(Connection("http://nobody:1", print), made, retries, print, self.said.append)


@pytest.mark.parametrize("retries", [0, 3])
def test_who_comes_second_follows_the_first(monkeypatch: pytest.MonkeyPatch, retries: int) -> None:
    """Two commands submit the run at the same moment; the lock of the run directory refuses one of the jobs."""
    lost, other = job("maze-a", "FAILED", 2), job("maze-b", "RUNNING")
    script = Script(monkeypatch, [[], [lost, other]], [lost, job("maze-b", "SUCCEEDED", 0)])
    script.run(retries)
    assert len(script.submitted) == 1 and script.followed == [script.submitted[0], "maze-b"]
    assert any("following maze-b" in line for line in script.said)


def test_bad_input_is_bad_input_if_nobody_else_writes_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = job("maze-a", "FAILED", 2)
    with pytest.raises(UserError, match="exit code 2"):
        Script(monkeypatch, [[], [lost]], [lost]).run(3)
    with pytest.raises(UserError, match="maze-b is writing /run with another recipe"):
        Script(monkeypatch, [[], [lost, job("maze-b", "RUNNING", recipe="other")]], [lost]).run(3)


@pytest.mark.parametrize("ended", [job("maze-a", "FAILED", -2), job("maze-a", "FAILED", 130), job("maze-a", "STOPPED")])
def test_every_kind_of_stop_is_a_stop(monkeypatch: pytest.MonkeyPatch, ended: JobDetails) -> None:
    with pytest.raises(Stopped):
        Script(monkeypatch, [[]], [ended]).run(3)


FAULT = job("maze-a", "FAILED", 1)


@pytest.mark.parametrize(
    ("steps", "step"),
    [
        ([7, 7, 7], 7),
        ([3, 7, 7, 5], 7),  # an earlier one is no progress either
        ([None, None, None], 0),
    ],
)
def test_the_same_step_failing_over_and_over_ends_it(
    monkeypatch: pytest.MonkeyPatch, steps: list[int | None], step: int
) -> None:
    said = "step 12/15\nstep 14/15: a move that an environment tells of\n"
    logs = [
        "clew: failed: no memory\n" if n is None else f"{said}step {n}/9 solved 1.00\nclew: failed: no memory\n"
        for n in steps
    ]
    script = Script(monkeypatch, [[]] * len(steps), [FAULT] * len(steps), *logs)
    with pytest.raises(RunFailed, match=rf"3 attempts in a row got no further than step {step}; .*\(no memory\)$"):
        script.run(9)
    assert len(script.submitted) == len(steps)


def test_attempts_that_get_further_are_not_counted_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only --retry ends it."""
    script = Script(monkeypatch, [[]] * 5, [FAULT] * 5, *(f"going on after step {n}\n" for n in range(5)))
    with pytest.raises(RunFailed, match=r"ended with exit code 1$"):
        script.run(4)
    assert len(script.submitted) == 5
    with pytest.raises(RunFailed, match=r"ended with exit code 1 \(--retry N submits it again by itself\)"):
        Script(monkeypatch, [[]], [FAULT]).run(0)


def test_a_machine_that_does_not_come_back_is_no_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a job whose run had its workers before; anywhere else the recipe asks for too much."""

    def error() -> type[Exception]:
        recipe = load_recipe("laptop", ["runtime.kind=ray", "runtime.nodes=2", "runtime.engines=2"])
        with (
            pytest.raises((RunFailed, UserError), match="the Ray cluster has 1 that take work") as caught,
            ray_cluster.cluster(recipe, tmp_path, print),
        ):
            pass
        return caught.type

    monkeypatch.setattr(ray_cluster, "_connected", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(ray_cluster, "MACHINES_BACK_S", 0.0)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}])
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert error() is UserError
    (tmp_path / ray_cluster.WORKERS).write_text("{}")
    assert error() is RunFailed
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    assert error() is UserError
