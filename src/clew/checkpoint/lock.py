"""One writer a run directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from pathlib import Path
from types import TracebackType

from clew.checkpoint.staging import make_directory, process_start, write_error
from clew.errors import UserError

LOCK_NAME = ".lock"
log = logging.getLogger(__name__)
_NAMING_S = 0.5  # what a holder may take to write its name into the file it locked


class RunLock:
    """An exclusive lock on a run directory, held until `release` or the death of the process, of any kind.

    A context manager, or `acquire()` and `release()`. The lock is on RUN/.lock, a file that stays. File
    systems shared between hosts must support `flock` (FSx for Lustre: mount option `flock`).

    Args:
        run_dir: the directory to lock; made if it is not there.
        patience_s: seconds for which a lock is waited for whose holder doesn't live on this host. A shared file
            system holds the lock of a host that is lost until it has given the host up, which takes minutes.
    """

    # flock and not POSIX locks: those vanish when any part of the process opens and closes the file (copying
    # the run directory does), and do not exclude a second lock in the same process.

    def __init__(self, run_dir: Path, patience_s: float = 0.0) -> None:
        self.path, self.patience_s = Path(os.path.abspath(run_dir)) / LOCK_NAME, patience_s
        self._descriptor: int | None = None
        self._told = False

    def acquire(self) -> RunLock:
        """Take the lock, creating the run directory if needed. UserError names the process that holds it."""
        pid = os.getpid()
        owner = json.dumps({"pid": pid, "start": process_start(pid), "host": socket.gethostname()})
        try:
            make_directory(self.path.parent)
            began = time.monotonic()
            while self._descriptor is None:
                try:
                    self._try_lock()
                except BlockingIOError:
                    self._refuse(time.monotonic() - began)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, owner.encode(), 0)
        except OSError as err:
            self._forget()
            if (clear := write_error(err, self.path)) is None:
                raise
            raise clear from err
        return self

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self._forget()

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _HELD.discard(self)

    def _try_lock(self) -> None:
        """Lock the file; `_descriptor` stays None if it was deleted meanwhile: nobody else would find it."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._lock(descriptor)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    self._descriptor = descriptor
                    _HELD.add(self)
        finally:
            if self._descriptor is None:
                os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            raise UserError(
                f"cannot lock {self.path}: this file system has no locks ({err.strerror}); mount it "
                "with them (Lustre: option `flock`) or choose another run directory with --run"
            ) from err

    def _refuse(self, waited_s: float) -> None:
        """UserError naming the living process that the lock file names, or a return after a pause.

        A dead or missing name is a holder about to write its own, or a killed one whose forked worker has not
        yet closed its copy; one of another host may be lost with it. A machine's replacement may have its name, so
        a dead one may have been of another machine, too.
        """
        try:
            owner = json.loads(self.path.read_text())
            pid, host, start = int(owner["pid"]), str(owner["host"]), owner.get("start")
        except (OSError, ValueError, KeyError, TypeError):
            pid, host, start = 0, "", None
        here = bool(pid) and host == socket.gethostname() and process_start(pid) == start
        named = here or (bool(pid) and host != socket.gethostname())
        if not named and waited_s <= _NAMING_S:
            time.sleep(0.02)
            return
        last = f" (the last one known is {pid} on {host})" if pid else ""
        holder = f"process {pid} on {host}" if named else f"another process{last}"
        if not here and waited_s < self.patience_s:
            if not self._told:
                log.warning("%s is locked by %s; waiting for it", self.path.parent, holder)
            self._told = True
            time.sleep(1)
            return
        raise UserError(
            f"{self.path.parent} is being written by {holder}; wait for it, stop it, or choose another run "
            "directory with --run"
        )


_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked worker inherits the descriptor and would hold the lock on after the death of the trainer."""
    for lock in list(_HELD):
        lock._forget()


os.register_at_fork(after_in_child=_forget_in_child)
