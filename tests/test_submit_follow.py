"""Ctrl-C while a log is followed: heard at every moment, and nothing half made is left for Python to print."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import warnings
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp comes with clew[ray]")

from clew.cloud.follow import run_interruptibly


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Ctrl-C's signal as in a terminal: whatever a script starts in its background is told to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python would have printed of exceptions in destructors."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", found.append)
    return found


def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with Ctrl-C when it is called for the first time."""
    signals = [signal.SIGINT]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        while signals:
            signal.raise_signal(signals.pop())
        return function(*arguments, **options)

    return wrapped


@pytest.mark.parametrize("moment", ["_make_self_pipe", "_close_self_pipe", "create_task", "shutdown_asyncgens"])
def test_ctrl_c_while_the_loop_is_made_or_closed(
    moment: str, printed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseSelectorEventLoop, moment, interrupted(getattr(BaseSelectorEventLoop, moment)))

    async def main() -> None:
        await asyncio.sleep(0)

    with warnings.catch_warnings(), pytest.raises(KeyboardInterrupt):
        warnings.simplefilter("error")  # a coroutine that was never awaited
        run_interruptibly(main())
    assert not printed and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_it_runs_ends_what_is_waited_for(printed: list[Any]) -> None:
    ended = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(main())
    assert ended and not printed


def test_the_second_ctrl_c_waits_for_nothing() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, signal.raise_signal, signal.SIGINT)
        loop.call_later(0.05, signal.raise_signal, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(30)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(main())
    assert time.monotonic() - started < 20


def test_without_ctrl_c_it_is_asyncio_run() -> None:
    async def fails() -> None:
        raise OSError("away")

    async def is_cancelled() -> None:
        raise asyncio.CancelledError

    with pytest.raises(OSError, match="away"):
        run_interruptibly(fails())
    with pytest.raises(asyncio.CancelledError):
        run_interruptibly(is_cancelled())


def test_where_ctrl_c_is_ignored_it_stays_ignored() -> None:
    async def main() -> None:
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_interruptibly(main())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
