"""Ctrl-C in two stages: the first one asks for an orderly stop, the second one stops at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)
_ASKED = "\nstopping: the current step is finished and saved first (Ctrl-C again stops at once)\n"


class StopRequest:
    """A context manager that holds SIGINT back until the step that is running has been saved.

    Attributes:
        asked: whether Ctrl-C was pressed.
        all_saved: set once there is nothing left to save; Ctrl-C then stops at once.
    """

    def __init__(self) -> None:
        self.asked = self.all_saved = False
        self._before: Any = None

    def __enter__(self) -> StopRequest:
        # Only the main thread gets signals; a job in the background of a shell is told to ignore this one.
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked or self.all_saved:
            # The process ends here and now. A library's thread may be caught halfway through something (TensorBoard's
            # writer, while an event is put into its queue), and what it says of that is nothing to the user.
            threading.excepthook = _note_down
            raise KeyboardInterrupt
        self.asked = True
        # Not print: the handler may run in the middle of another print, which Python's buffers refuse.
        os.write(2, _ASKED.encode())


def _note_down(fault: threading.ExceptHookArgs) -> None:
    log.debug("a thread ended while the process was being stopped", exc_info=fault.exc_value)
