"""A real Ray head (and machines that join it) in processes of their own, with a dashboard that takes jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from conftest import ROOT, finish_clew


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, above those that Ray gives to its workers (10002-19999)."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class RayHead:
    """A head whose jobs import this Clew and find ``python``; ``kill`` takes it down as a lost machine would go.

    Args:
        cpus: 0, as on HyperPod, or as many as jobs may use.
        port: the dashboard's; a free one if not given.
    """

    def __init__(self, cpus: int = 2, port: int | None = None) -> None:
        gcs, dashboard, *others = free_ports(4)
        self.port, self.gcs = port or dashboard, gcs
        self.address = f"http://127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets below it have short names
        self.processes: list[subprocess.Popen[bytes]] = []
        self._start(
            "--head",
            f"--port={gcs}",
            f"--dashboard-port={self.port}",
            "--dashboard-host=127.0.0.1",
            f"--ray-client-server-port={others[0]}",
            f"--dashboard-agent-listen-port={others[1]}",
            f"--num-cpus={cpus}",
            f"--temp-dir={self.folder}",
        )
        self._wait()

    def join(self, cpus: int = 1) -> None:
        """Adds a machine that works."""
        (agent,) = free_ports(1)
        self._start(f"--address=127.0.0.1:{self.gcs}", f"--num-cpus={cpus}", f"--dashboard-agent-listen-port={agent}")

    def _start(self, *options: str) -> None:
        bin_folder = str(Path(sys.executable).parent)
        env = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT / "src"),
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--object-store-memory=100000000"]
        self.processes.append(
            subprocess.Popen(
                [*command, *options],
                env=env,
                stdout=(self.folder / "start.log").open("ab"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # As for whatever a script starts in its background: a job must hear Ray's Ctrl-C all the same.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            )
        )

    def _wait(self) -> None:
        until = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.address}/api/version", timeout=5).close()
                return
            except OSError:
                ended = self.processes[0].poll() is not None
                assert not ended and time.monotonic() < until, (self.folder / "start.log").read_text()
                time.sleep(0.1)

    def kill(self) -> None:
        """Ends all its processes at once; files stay."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.clear()

    def close(self) -> None:
        """Takes it down in order and removes its files."""
        for process in reversed(self.processes):
            process.terminate()  # `ray start --block` ends what it started
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


# ---- runs that it is given


def wait_until(condition: Any, process: subprocess.Popen[str] | None = None, timeout: float = 300) -> Any:
    """Polls until there is something, as long as the process lives."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        try:
            if found := condition():
                return found
        except (OSError, ValueError, KeyError):
            pass  # not written yet
        assert process is None or process.poll() is None, finish_clew(process)
        time.sleep(0.05)
    raise AssertionError(f"nothing came within {timeout} s")


def steps(run_dir: Path) -> list[int]:
    """The training steps that are done."""
    return [step for line in (run_dir / "metrics.jsonl").read_text().splitlines() if (step := json.loads(line)["step"])]


def driver(run_dir: Path) -> int:
    """The process that writes a run directory."""
    return int(json.loads((run_dir / ".lock").read_text())["pid"])


def ids(text: str) -> list[str]:
    """The jobs that a command says it submitted."""
    return re.findall(r"\[clew\] submitted (\S+),", text)
