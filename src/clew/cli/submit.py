"""``clew submit``, ``status``, ``logs`` and ``stop``: a run on a cluster that takes jobs."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clew.cloud.address import check_address
from clew.cloud.command import cluster_run_dir, entrypoint, refuse_own_folder, refuse_secrets
from clew.cloud.working_set import RECIPE_FILE, module_folder, pack
from clew.errors import UserError
from clew.recipe import Recipe, load_recipe
from clew.runtime.prepare import hub_id
from clew.runtime.process import check_supported, check_worlds, configure_environments

if TYPE_CHECKING:
    from clew.cloud.connection import Connection

_PYTHON = ("python", "-m", "clew.cli")


def submit(name: str, overrides: Sequence[str], address: str, run: str | None, retries: int, follow: bool) -> None:
    """Submits a run as a job, or finds the job that is live, and follows it to the run's end.

    Raises:
        UserError: bad input; exit code 2 of the job too.
        RunFailed: the run did not get to its end.
        typer.Exit: 130, the job was stopped, or following it was.
    """
    if retries and not follow:
        raise UserError(
            "--retry submits again when a job is lost, and --no-follow doesn't wait for that: leave out one"
        )
    recipe = load_recipe(name, overrides)
    check_supported(recipe)
    modules = module_folder(name, recipe)
    run_dir = cluster_run_dir(recipe, run)
    refuse_own_folder(recipe)
    refuse_secrets(recipe)
    fetched = hub_id(recipe) is not None
    if fetched and not (recipe.runtime.shared_dir or "").startswith("/"):
        raise UserError(
            f"runtime.shared_dir is left out, and {recipe.model.path} has to be downloaded to a folder that all "
            "machines of the cluster see: set it, e.g. runtime.shared_dir=/shared"
        )
    if (unchecked := _check_environment(recipe, modules)) is not None:
        _say(unchecked)
    with _connection(address) as connection, tempfile.TemporaryDirectory(prefix="clew-submit-") as staging:
        packed = pack(recipe, modules, Path(staging))
        _say(packed.describe())

        from clew.cloud.attempts import Stopped, begin, see_through
        from clew.cloud.jobs import Job

        command = entrypoint(RECIPE_FILE, run_dir, prepare=fetched, clew=_PYTHON)
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(run_dir).name).strip("-.")[:60]  # it becomes part of addresses
        job = Job(stem or "run", run_dir, command, packed.folder, packed.digest)
        if not follow:
            submission_id = begin(connection, job, _say)
            _say(f"to follow it: clew logs {submission_id} --follow --address {address}")
            return
        try:
            see_through(connection, job, retries, _write, _say)
        except Stopped as stopped:
            _say(f"{stopped}: was stopped")
            raise typer.Exit(130) from stopped
        except KeyboardInterrupt:
            _say("no longer following; the job goes on (`clew stop` ends it, the same command follows it again)")
            raise


def status(submission_id: str | None, address: str) -> None:
    """Prints Clew's jobs, or all about one of them."""
    with _connection(address) as connection:
        from clew.cloud.follow import Watch, whole_log
        from clew.cloud.jobs import ATTEMPT, RUN, chosen, clew_jobs, ending, is_live

        if submission_id is None:
            jobs = clew_jobs(connection)
            for job in jobs:
                facts = job.metadata or {}
                print(f"{job.submission_id}  {ending(job)}  {_times(job.start_time, job.end_time)}  {facts.get(RUN)}")
            if not jobs:
                print(f"none of Clew's jobs is at {address}")
            return
        job = chosen(connection, submission_id)
        facts = job.metadata or {}
        watch = Watch()
        watch.feed(whole_log(connection, str(job.submission_id)))
        lines = {
            "job": f"{job.submission_id} (attempt {facts.get(ATTEMPT, '?')})",
            "state": ending(job) + (f" ({watch.last_words})" if watch.last_words and not is_live(job) else ""),
            "time": _times(job.start_time, job.end_time),
            "last step": watch.step if watch.step is not None else "none yet",
            "run directory": facts.get(RUN, "unknown"),
            "command": job.entrypoint,
        }
        for key, value in lines.items():
            print(f"{key + ':':15}{value}")


def logs(submission_id: str | None, address: str, follow: bool) -> None:
    """Prints a job's log; with ``follow``, until the job has ended."""
    with _connection(address) as connection:
        from clew.cloud import follow as following
        from clew.cloud.attempts import PATIENCE_S
        from clew.cloud.jobs import chosen, ending

        found = str(chosen(connection, submission_id).submission_id)
        if not follow:
            _write(following.whole_log(connection, found))
            return
        ended = following.follow(connection, found, _write, _say, PATIENCE_S)
        _say(f"{found}: {ending(ended) if ended is not None else 'was lost with its cluster'}")


def stop(submission_id: str | None, address: str) -> None:
    """Asks a job to stop, which saves the run first, and waits until it has."""
    with _connection(address) as connection:
        from clew.cloud.attempts import PATIENCE_S
        from clew.cloud.jobs import STOP_WAIT_S, chosen, details, ending, is_live

        job = chosen(connection, submission_id)
        found = str(job.submission_id)
        if not is_live(job):
            _say(f"{found}: {ending(job)}; there is nothing to stop")
            return
        connection.ask(lambda client: client.stop_job(found))
        _say(f"{found}: asked to stop; it saves the step it is at first, for which it has {STOP_WAIT_S // 60} min")
        while (now := details(connection, found, PATIENCE_S)) is not None and is_live(now):
            time.sleep(1)
        _say(f"{found}: {ending(now) if now is not None else 'was lost with its cluster'}")


@contextlib.contextmanager
def _connection(address: str) -> Iterator[Connection]:
    """A cluster's job server; who does not answer at all is bad input."""
    checked = check_address(address)
    if find_spec("ray") is None:
        raise UserError('jobs are sent with Ray, which is not installed: pip install "clew[ray]"')
    from clew.cloud.connection import Connection
    from clew.cloud.ray_client import NoDashboard, Unreachable

    connection = Connection(checked, _say)
    try:
        connection.ask(lambda client: client.get_address())  # before anything is packed
        yield connection
    except NoDashboard as stranger:
        raise UserError(f"--address {checked}: {stranger}") from stranger
    except Unreachable as silence:
        raise UserError(
            f"--address {checked}: nobody answers there ({silence}); is the cluster up, its dashboard on, and the "
            "address reachable from here?"
        ) from silence


def _check_environment(recipe: Recipe, modules: Path | None) -> str | None:
    """Makes the recipe's worlds, where this machine can; else returns a line that says why it could not."""
    configure_environments(recipe)
    if modules is not None:
        sys.path.insert(0, str(modules))  # as it is where the job runs
    try:
        check_worlds(recipe)
    except UserError as error:
        if recipe.environment.id.startswith("clew/") or modules is not None:  # the same there
            raise
        return f"the environment is not checked, this installation can't make it ({error})"
    return None


def _times(start: int | None, end: int | None) -> str:
    """When a job began, and for how long; milliseconds since 1970."""
    if not start:
        return "not begun"
    from clew.report.progress import duration

    until = end / 1000 if end else max(time.time(), start / 1000)  # the two machines' clocks may differ
    return f"{datetime.fromtimestamp(start / 1000, UTC):%Y-%m-%d %H:%M} UTC, {duration(until - start / 1000)}"


def _say(text: str) -> None:
    """A line of ours among those of the job."""
    print(f"[clew] {text}", flush=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
