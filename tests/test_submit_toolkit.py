"""`sagemaker_ray://` by the real toolkit package, against a stand-in of its two AWS ends with TLS (see gateway.py).

What is real: the toolkit, TLS, Ray's client, dashboard and jobs, the drivers that are killed. What is not: AWS.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Command, finish_clew, start_clew
from gateway import Gateway
from ray_head import RayHead, driver, ids, steps, wait_until

from clew.cloud.connection import Connection
from clew.cloud.follow import follow
from clew.cloud.jobs import Job, submit
from clew.errors import UserError

pytest.importorskip("sagemaker_ray", reason="needs toolkit-for-ray-on-sagemaker-ai (the extra aws)")
ADDRESS = "sagemaker_ray://maze/team-a"


@pytest.fixture
def gateway(ray_head: RayHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    """The stand-in in front of the shared head; clients of this test trust it and have its kubeconfig."""
    made = Gateway(ray_head.address, tmp_path)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    yield made
    made.close()


def test_a_session_that_ends_in_the_middle_is_renewed_and_no_line_is_lost(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "working").mkdir()
    (tmp_path / "working" / "x").touch()
    said: list[str] = []
    connection, log = Connection(ADDRESS, said.append), ""
    script = "for i in 1 2 3 4 5 6; do echo line $i; sleep 0.5; done"
    submit(connection, Job("session", "/run", script, tmp_path / "working", "digest"), "session-1", 1)

    def write(text: str) -> None:
        nonlocal log
        log += text
        if "line 2\n" in log and gateway.sign_ins == 1:
            gateway.expire()
        if "line 4\n" in log and gateway.sign_ins == 2:
            gateway.to_login = True  # the other way in which gateways say so
            gateway.expire()

    ended = follow(connection, "session-1", write, said.append, 60)
    assert ended is not None and ended.status == "SUCCEEDED"
    assert [line for line in log.splitlines() if line.startswith("line")] == [f"line {n}" for n in range(1, 7)]
    assert gateway.sign_ins == 3


def test_who_is_not_let_in_is_told_why_in_one_line(
    gateway: Gateway, clew: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(address: str) -> str:
        outcome = clew("status", "--address", address)
        assert outcome.code == 2 and len(outcome.err.splitlines()) == 1, outcome
        assert gateway.token not in outcome.err
        return outcome.err

    assert "Verify the cluster name and namespace" in refused("sagemaker_ray://maze/team-b")
    gateway.let_in = False
    assert "Your EKS credentials may have expired" in refused(ADDRESS)
    gateway.let_in = True
    # A plain address of the gateway: nothing to sign in with.
    assert "lets nobody in without signing in (HTTP 401)" in refused(gateway.url)
    gateway.to_login = True
    said = refused(gateway.url)
    assert "which sends to https://signin.invalid/)" in said and "secret" not in said
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    assert "is not trusted" in refused(gateway.url) and "REQUESTS_CA_BUNDLE" in refused(gateway.url)
    for text in ("not: [a kubeconfig", "current-context: test\ncontexts: [{name: test}]\n"):
        gateway.kubeconfig.write_text(text)
        assert "kubeconfig" in refused(ADDRESS)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    assert "Kubeconfig not found" in refused(ADDRESS)


def test_credentials_that_expire_while_a_job_runs_are_named(gateway: Gateway) -> None:
    connection = Connection(ADDRESS, print)
    connection.ask(lambda client: client.list_jobs())
    gateway.expire()
    gateway.let_in = False
    with pytest.raises(UserError, match=r"EKS credentials may have expired.*; what was submitted goes on") as caught:
        connection.ask(lambda client: client.list_jobs(), 60)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_submit_follow_kill_resume_finish(gateway: Gateway, quick_recipe: Path, tmp_path: Path, clew: Command) -> None:
    run_dir = tmp_path / "run"
    process = start_clew("submit", quick_recipe, "--address", ADDRESS, "--run", run_dir, "--retry", "2")
    wait_until(lambda: len(steps(run_dir)) >= 2, process)
    gateway.expire()
    os.kill(driver(run_dir), signal.SIGKILL)
    outcome = finish_clew(process)
    assert outcome.code == 0 and outcome.err == "", outcome
    first, second = ids(outcome.out)
    assert re.fullmatch(r"run-attempt-1-[0-9a-f]{6}", first) and re.fullmatch(r"run-attempt-2-[0-9a-f]{6}", second)
    assert f"{first} was ended by SIGKILL" in outcome.out
    assert "going on after step" in outcome.out and f"[clew] {second}: finished" in outcome.out
    assert steps(run_dir) == [1, 2, 3, 4, 5, 6]
    for secret in (gateway.token, *gateway.sessions):
        assert secret not in outcome.out
    status = clew("status", second, "--address", ADDRESS)
    assert "(attempt 2)" in status.out and "last step:     6" in status.out and str(run_dir) in status.out
    listed = clew("status", "--address", ADDRESS).out.splitlines()
    assert any(line.startswith(f"{first}  was ended by SIGKILL  ") for line in listed)
    assert any(line.startswith(f"{second}  finished  ") for line in listed)
    logs = clew("logs", second, "--address", ADDRESS)
    assert logs.code == 0 and "\nstep 6/6 " in logs.out
    assert clew("logs", "nowhere", "--address", ADDRESS).code == 2
