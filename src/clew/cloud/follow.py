"""A job's log as it grows: no line twice, none lost, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
from ray.job_submission import JobDetails, JobStatus

from clew.cloud.connection import Connection
from clew.cloud.jobs import details, is_live
from clew.cloud.ray_client import JobClient, NoSuchJob, SessionEnded, Unreachable

SILENCE_S = 120.0
"""Seconds without a word after which a connection is made anew: it may be dead without knowing."""
_ROUND_S, _LAST_WORDS_S = 1.0, 10.0
_STEP = re.compile(r"step (\d+)/\d+ solved\b|.*\bgoing on after step (\d+)$")
_WORDS = ("clew: error: ", "clew: failed: ", "clew: fault: ")


class Watch:
    """What a log says of its run.

    Attributes:
        step: the last training step that is known to be done; None if none was mentioned.
        last_words: the line in which ``clew`` said why it ended, without its beginning; "" if there is none.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.last_words = ""
        self._rest = ""

    def feed(self, text: str) -> None:
        """Takes in the next piece of the log."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if (match := _STEP.match(line)) is not None:
                self.step = max(self.step or 0, int(match[1] or match[2]))
            elif line.startswith(_WORDS):
                self.last_words = line.split(": ", 2)[2]


def follow(
    connection: Connection,
    submission_id: str,
    write: Callable[[str], None],
    say: Callable[[str], None],
    patience_s: float,
) -> JobDetails | None:
    """Passes a job's log on, from its beginning, until the job has ended.

    Args:
        write: given each piece of the log once, in order.
        say: told when the job waits or begins to run.
        patience_s: seconds for which a cluster that does not answer is waited for.

    Returns:
        The ended job; None if the cluster has forgotten it, which a cluster that was made anew has.

    Raises:
        Unreachable: nobody answered for ``patience_s``.
    """
    seen, state = 0, None

    def take(text: str) -> None:
        nonlocal seen
        seen += len(text)
        if text:
            write(text)

    while True:
        job = details(connection, submission_id, patience_s)
        if job is None:
            return None
        if job.status != state and is_live(job):
            state = job.status
            say(f"{submission_id}: {JobStatus(state).value.lower()}")
        if job.status == JobStatus.RUNNING:
            _tail(connection, submission_id, seen, take)
            job = details(connection, submission_id, patience_s)
        # By a plain request: where no websocket gets through, this is all there is.
        over = job is None or not is_live(job)
        try:
            take(whole_log(connection, submission_id, _LAST_WORDS_S if over else 0.0)[seen:])
        except Unreachable as silence:
            if over:  # what is known of the job is worth more than the end of its log
                say(f"{submission_id}: the end of its log can't be read ({silence})")
        if over:
            return job
        time.sleep(_ROUND_S)


def whole_log(connection: Connection, submission_id: str, patience_s: float = 0.0) -> str:
    """A job's log as it is now; empty if the cluster knows no such job."""

    def ask(client: JobClient) -> str:
        try:
            return client.get_job_logs(submission_id)
        except NoSuchJob:
            return ""

    return connection.ask(ask, patience_s)


def _tail(connection: Connection, submission_id: str, seen: int, take: Callable[[str], None]) -> None:
    """Passes on what comes after the first ``seen`` characters until the connection ends, in whichever way."""
    try:
        client = connection.client()
    except (Unreachable, SessionEnded):  # whoever asks next by a plain request waits or signs in
        return
    # A refused handshake, a lost connection, an end without a closing word: the job's state says what it was.
    with contextlib.suppress(aiohttp.ClientError, OSError, RuntimeError, asyncio.TimeoutError):
        run_interruptibly(_pass_on(client.tail_job_logs(submission_id), seen, take))


def run_interruptibly(main: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run`` on the main thread, which hears Ctrl-C at every moment, but is never left half made by it.

    asyncio's own handler is there only while the loop runs. Ctrl-C a moment earlier or later ends in the middle of the
    loop's making or closing, and Python prints what it finds of it.

    Raises:
        KeyboardInterrupt: it was interrupted; ``main`` was cancelled, or never began.
    """
    interrupted = False
    task: asyncio.Task[Any] | None = None

    def note(number: int, frame: object) -> None:
        nonlocal interrupted
        if interrupted:  # the second time: at once, whatever the first one waits for
            raise KeyboardInterrupt
        interrupted = True
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def begin() -> None:
        nonlocal task
        task = asyncio.current_task()
        if not interrupted:
            await main

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, or somebody else's
        signal.signal(signal.SIGINT, note)
    try:
        asyncio.run(begin())
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        main.close()  # in case it never began
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt


async def _pass_on(stream: AsyncIterator[str], seen: int, take: Callable[[str], None]) -> None:
    passed = 0
    while True:
        coming = asyncio.ensure_future(_next(stream))
        try:
            done, _ = await asyncio.wait({coming}, timeout=SILENCE_S)
        finally:  # Ctrl-C ends the wait, and what is waited for has to end with it
            coming.cancel()
        if not done or (text := coming.result()) is None:
            return
        passed += len(text)
        if passed > seen:
            take(text[-(passed - seen) :])
            seen = passed


async def _next(stream: AsyncIterator[str]) -> str | None:
    return await anext(stream, None)
