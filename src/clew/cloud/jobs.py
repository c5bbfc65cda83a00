"""Clew's jobs on a cluster: what is submitted, how it is told from other jobs, and how one ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray.job_submission import JobDetails, JobStatus

from clew import __version__
from clew.cloud.connection import Connection
from clew.cloud.ray_client import JobClient, NoSuchJob
from clew.errors import UserError

VERSION, RUN, RECIPE, ATTEMPT = "clew", "clew_run", "clew_recipe", "clew_attempt"
"""Keys of a job's metadata, by which Clew knows its own."""
STOP_WAIT_S = 300
"""Seconds that a stopped run has to finish its step and save it."""
_ENVIRONMENT = {
    "RAY_JOB_STOP_SIGNAL": "SIGINT",
    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
}  # read by Ray's supervisor


@dataclass(frozen=True)
class Job:
    """What is submitted, at every attempt alike.

    Attributes:
        name: beginning of the submission ids.
        run_dir: run directory on the cluster; at most one job at a time writes it.
        entrypoint: shell command.
        folder: working set, which becomes the job's working directory.
        digest: of the working set.
    """

    name: str
    run_dir: str
    entrypoint: str
    folder: Path
    digest: str


def submit(connection: Connection, job: Job, submission_id: str, attempt: int, patience_s: float = 0.0) -> None:
    """Submits a job under a new id.

    Raises:
        Unreachable: nobody answers.
        UserError: the cluster takes no such job.
    """
    metadata = {VERSION: __version__, RUN: job.run_dir, RECIPE: job.digest, ATTEMPT: str(attempt)}
    asked = False

    def ask(client: JobClient) -> None:
        nonlocal asked
        if asked and _details(client, submission_id) is not None:
            return  # it came through before, and only the answer was lost
        asked = True
        try:
            client.submit_job(
                entrypoint=job.entrypoint,
                submission_id=submission_id,
                runtime_env={"working_dir": str(job.folder), "env_vars": dict(_ENVIRONMENT)},
                metadata=dict(metadata),
            )
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"--address {connection.address}: the cluster takes no job ({_line(str(error))})"
            ) from error

    connection.ask(ask, patience_s)


def details(connection: Connection, submission_id: str, patience_s: float = 0.0) -> JobDetails | None:
    """What the cluster knows of a job; None if it knows no such job."""
    return connection.ask(lambda client: _details(client, submission_id), patience_s)


def _details(client: JobClient, submission_id: str) -> JobDetails | None:
    try:
        return client.get_job_info(submission_id)
    except NoSuchJob:
        return None


def clew_jobs(connection: Connection, patience_s: float = 0.0) -> list[JobDetails]:
    """Clew's jobs, the oldest first."""
    found = connection.ask(lambda client: client.list_jobs(), patience_s)
    return sorted((job for job in found if VERSION in (job.metadata or {})), key=lambda job: job.start_time or 0)


def is_live(job: JobDetails) -> bool:
    """Whether a job waits or runs."""
    return not JobStatus(job.status).is_terminal()


def chosen(connection: Connection, submission_id: str | None) -> JobDetails:
    """The job of an id, or the only live one.

    Raises:
        UserError: there is no such job, or not exactly one is live.
    """
    if submission_id is not None:
        found = details(connection, submission_id) if submission_id and "/" not in submission_id else None
        if found is None or found.submission_id is None:  # none, or a driver that nobody submitted
            known = _named(clew_jobs(connection)[-5:])
            raise UserError(f"there is no job {submission_id} at {connection.address} (the last ones: {known})")
        return found
    live = [job for job in clew_jobs(connection) if is_live(job)]
    if len(live) != 1:
        raise UserError(
            f"{len(live) or 'none'} of Clew's jobs at {connection.address} {'are' if live else 'is'} live: give the id "
            f"of one ({_named(live or clew_jobs(connection)[-5:])})"
        )
    return live[0]


def _named(jobs: Sequence[JobDetails]) -> str:
    return ", ".join(str(job.submission_id) for job in jobs) or "none of Clew's is there"


def ending(job: JobDetails) -> str:
    """How a job ended, in a few words."""
    status, code = JobStatus(job.status), job.driver_exit_code
    if status == JobStatus.SUCCEEDED:
        return "finished"
    if status == JobStatus.STOPPED:
        return "was stopped"
    if status != JobStatus.FAILED:
        return status.value.lower()
    if code is None:
        return f"failed ({_line(job.message or job.error_type or 'for no reason given')})"
    number = -code if code < 0 else code - 128  # a shell says of a signal 128 + its number
    if number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"


def _line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if lines and lines[-1].startswith(("ValueError", "RuntimeError", "TypeError")):  # of a traceback
        return lines[-1][:300]
    return lines[0][:300] if lines else ""
