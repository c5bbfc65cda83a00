"""Writes to shared storage that is full or away for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from clew.errors import StorageError

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


def with_patience(write: Callable[[], T], patience_s: float, note: Callable[[str], None]) -> T:
    """Calls ``write`` again, after pauses that double, for as long as storage refuses and patience lasts.

    Args:
        patience_s: seconds after which the last refusal is raised.
        note: told what was refused and when it is tried again.

    Raises:
        StorageError: it was refused to the end.
    """
    began, pause = time.monotonic(), _FIRST_PAUSE_S
    while True:
        try:
            return write()
        except StorageError as refusal:
            if time.monotonic() - began + pause > patience_s:
                raise
            note(f"{refusal} (trying again in {pause:.1f} s)")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
