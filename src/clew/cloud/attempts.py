"""A run seen through to its end: followed, and submitted again when its driver or its machines are lost."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Sequence

from ray.job_submission import JobDetails, JobStatus

from clew.cloud.connection import Connection
from clew.cloud.follow import Watch, follow
from clew.cloud.jobs import ATTEMPT, RECIPE, RUN, Job, clew_jobs, ending, is_live, submit
from clew.cloud.ray_client import Unreachable
from clew.errors import RunFailed, UserError

PATIENCE_S = 3600.0
"""Seconds for which a cluster that does not answer is waited for: a machine is replaced within minutes to an hour."""
STUCK_AFTER = 3
"""Attempts in a row that end without a new step before it is called hopeless."""
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_BAD_INPUT, _INTERRUPTED = 2, (130, -signal.SIGINT)


class Stopped(Exception):
    """Somebody stopped the job."""


def begin(connection: Connection, job: Job, say: Callable[[str], None], patience_s: float = 0.0) -> str:
    """Submits a job, unless one for the same run directory is live: then it is that one. Returns the submission id.

    Raises:
        Unreachable: nobody answered for ``patience_s``.
        UserError: the live one has another recipe, or the cluster takes no such job.
    """
    own = _of_the_run(connection, job, patience_s)
    if (live := _live(own, job)) is not None:
        say(f"{live} is live and writes {job.run_dir}: no other is submitted")
        return live
    attempt = 1 + max((int((found.metadata or {}).get(ATTEMPT, "0")) for found in own), default=0)
    submission_id = f"{job.name}-attempt-{attempt}-{secrets.token_hex(3)}"
    submit(connection, job, submission_id, attempt, patience_s)
    say(f"submitted {submission_id}, which writes {job.run_dir}")
    return submission_id


def _of_the_run(connection: Connection, job: Job, patience_s: float) -> list[JobDetails]:
    return [found for found in clew_jobs(connection, patience_s) if (found.metadata or {}).get(RUN) == job.run_dir]


def _live(own: Sequence[JobDetails], job: Job) -> str | None:
    """The live one of a run's jobs.

    Raises:
        UserError: it has another recipe.
    """
    for found in filter(is_live, own):
        if (found.metadata or {}).get(RECIPE) != job.digest:
            raise UserError(
                f"job {found.submission_id} is writing {job.run_dir} with another recipe: stop it with `clew stop "
                f"{found.submission_id}`, or choose another --run"
            )
        return str(found.submission_id)
    return None


def see_through(
    connection: Connection, job: Job, retries: int, write: Callable[[str], None], say: Callable[[str], None]
) -> None:
    """Submits a job, or finds the one that is live, and follows it to the run's end.

    A job that is lost, or ends with a fault, is submitted again under a new id; the run goes on from its last whole
    checkpoint. Bad input and a stop are never repeated.

    Args:
        retries: how often it may be submitted again.
        write: given the log, piece by piece.
        say: told what becomes of the jobs.

    Raises:
        RunFailed: the run did not get to its end.
        Stopped: it was stopped.
        UserError: bad input, here or there.
    """
    submission_id = begin(connection, job, say)
    best, fruitless, pause, left = -1, 0, _PAUSE_S, retries
    while True:
        watch = Watch()

        def take(text: str, watch: Watch = watch) -> None:
            watch.feed(text)
            write(text)

        try:
            ended = follow(connection, submission_id, take, say, PATIENCE_S)
            # Two commands that see a run through may submit it at the same moment: the run takes one of the jobs.
            refused = ended is not None and ended.driver_exit_code == _BAD_INPUT
            writer = _live(_of_the_run(connection, job, PATIENCE_S), job) if refused else None
        except Unreachable as silence:
            raise RunFailed(
                f"{connection.address} did not answer for {PATIENCE_S / 60:.0f} min ({silence}); a job that is still "
                "there is followed by the same command"
            ) from silence
        if writer is not None:
            say(f"{submission_id} came second; following {writer}, which writes {job.run_dir}")
            submission_id = writer
            continue
        if (reason := _fault(submission_id, ended, watch)) is None:
            say(f"{submission_id}: finished")
            return
        step = watch.step or 0
        best, fruitless, pause = (step, 1, _PAUSE_S) if step > best else (best, fruitless + 1, pause)
        if not left:
            hint = "" if retries else " (--retry N submits it again by itself)"
            raise RunFailed(f"{reason}{hint}")
        if fruitless >= STUCK_AFTER:
            raise RunFailed(f"{fruitless} attempts in a row got no further than step {best}; the last one: {reason}")
        say(f"{reason}; submitting it again in {pause:.0f} s (retry {retries - left + 1} of {retries})")
        left -= 1
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        try:
            submission_id = begin(connection, job, say, PATIENCE_S)
        except Unreachable as silence:
            raise RunFailed(f"{reason}; the cluster did not come back within {PATIENCE_S / 60:.0f} min") from silence


def _fault(submission_id: str, ended: JobDetails | None, watch: Watch) -> str | None:
    """Why a job did not get to its end, where that may go better another time; None if it did get there.

    Raises:
        UserError: bad input.
        Stopped: it was stopped.
    """
    if ended is None:
        return f"{submission_id} was lost with its cluster"
    if ended.status == JobStatus.SUCCEEDED:
        return None
    code = ended.driver_exit_code
    if code == _BAD_INPUT:
        raise UserError(f"{submission_id} ended with exit code 2: {watch.last_words or 'its log says why'}")
    if ended.status == JobStatus.STOPPED or code in _INTERRUPTED:
        raise Stopped(submission_id)
    words = f" ({watch.last_words})" if watch.last_words and code == 1 else ""
    return f"{submission_id} {ending(ended)}{words}"
