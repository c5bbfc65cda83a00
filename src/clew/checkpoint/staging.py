"""Names of things in the making, who makes them, and the primitive steps that make them durable.

A staging entry is named ".tmp-NAME~HOST~PID~START~N". HOST holds the host name and the PID namespace (two
containers can share a host name but not process ids), START the kernel's start time of the process, so that a
process id used again by another process is not taken for the one that died.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import re
import shutil
import socket
import stat
import time
from pathlib import Path

from clew.errors import StorageError, UserError

PREFIX = ".tmp-"
# Nobody can ask whether a process of another host still lives. A writer touches its staging entry all the
# time, so one that was left alone this long belongs to a node that is gone.
FOREIGN_IDLE_S = 3600.0

log = logging.getLogger("clew.checkpoint")
_COUNTER = itertools.count()
_NAME = re.compile(re.escape(PREFIX) + r".*~(?P<host>[^~]+)~(?P<pid>\d+)~(?P<start>\d+)~\d+")

# Errors that only writing can meet, wherever in the chain of exceptions they sit ...
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the largest allowed file size is reached (ulimit -f)",
    errno.EROFS: "the file system is read-only",
}
# ... and errors that mean "this place cannot be written" only when they name the place itself.
_PLACE = {
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.ENOENT: "there is no such place, and it can't be made",
    errno.ENOTDIR: "a part of this path is a file, not a directory",
    errno.EISDIR: "this is a directory, not a file",
    errno.ENAMETOOLONG: "the name is too long",
}


def _host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux: no PID namespaces
        namespace = ""
    return re.sub(r"[^A-Za-z0-9]+", "_", f"{socket.gethostname()[:64]}_{namespace}").strip("_")


def process_start(pid: int) -> str | None:
    """Kernel start time of a living process of this host in clock ticks ("0" where unknown); None: dead."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # alive, of another user
        pass
    try:
        # proc(5): the fields after the command's closing parenthesis start with 3 (state); 22 is starttime.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # no /proc here, or it hides other users' processes
        return "0"
    return None if fields[0] in "ZX" else fields[19]


def staging_path(final: Path) -> Path:
    """A fresh sibling name of `final` that tells which process is writing it."""
    owner = f"{_host()}~{os.getpid()}~{process_start(os.getpid())}~{next(_COUNTER)}"
    return final.parent / f"{PREFIX}{final.name}~{owner}"


def _abandoned(entry: Path) -> bool:
    match = _NAME.fullmatch(entry.name)
    if match is None:
        return False
    if match["host"] == _host():
        start = process_start(int(match["pid"]))
        return start is None or (start != match["start"] and "0" not in (start, match["start"]))
    newest = entry.lstat().st_mtime
    for folder, _, names in os.walk(entry):
        for name in (".", *names):
            newest = max(newest, os.lstat(os.path.join(folder, name)).st_mtime)
    return time.time() - newest > FOREIGN_IDLE_S


def clean_staging(root: Path) -> list[Path]:
    """Remove what dead processes left half-written anywhere below `root`; returns what was removed.

    Entries of living processes stay; those of other hosts and containers stay until an hour has passed idle.
    """
    removed = []
    for folder, directories, files in os.walk(root):
        staged = [name for name in directories if name.startswith(PREFIX)]
        directories[:] = [name for name in directories if name not in staged]
        for name in (*staged, *(name for name in files if name.startswith(PREFIX))):
            entry = Path(folder, name)
            try:
                if _abandoned(entry):
                    remove(entry)
                    removed.append(entry)
            except FileNotFoundError:
                continue  # meanwhile published or removed by the process that owns it
            except OSError as err:
                log.warning("leftover %s could not be removed: %s", entry, err)
    return removed


def remove(entry: Path) -> None:
    """Delete a file or a whole directory."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def discard(entry: Path) -> None:
    """Delete a staging entry on the way out of an error, which a second one must not hide."""
    with contextlib.suppress(OSError):
        # torch's writer keeps a file open that it failed to write: deleted, it would go on filling the disk
        # until the process ends; emptied, it does not. The content of hard links is somebody else's too.
        for folder, _, names in os.walk(entry):
            for path in (os.path.join(folder, name) for name in names):
                if stat.S_ISREG((found := os.lstat(path)).st_mode) and found.st_nlink == 1:
                    os.truncate(path, 0)
    with contextlib.suppress(OSError):
        remove(entry)


def fsync_path(path: Path) -> None:
    """Flush a file, or a directory's list of names, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as err:
        # Some network file systems cannot flush a directory and write its names through at once.
        if not (path.is_dir() and err.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)):
            raise
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """mkdir -p whose every new name survives a power cut."""
    missing = []
    place = path
    while not place.exists():
        missing.append(place)
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def write_all(descriptor: int, data: bytes) -> None:
    """os.write until every byte is taken: a nearly full disk accepts a part and reports no error."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _probe(folder: Path) -> int | None:
    """The errno of writing a little more into `folder`, None if that works."""
    path = folder / ".probe"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(descriptor, bytes(1 << 16))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink()
    except OSError as err:
        return err.errno
    return None


def write_error(err: BaseException, target: Path, staging: Path | None = None) -> StorageError | None:
    """The one-line error for a disk that is full, read-only or closed to us; None if `err` is anything else.

    safetensors reports a full disk as its own type with the number in the text, torch as RuntimeError without
    any. Hence, while the half-written `staging` still stands, the disk itself is asked whether it takes more.
    """
    if isinstance(err, UserError) or not isinstance(err, Exception):
        return None
    reason = None
    link: BaseException | None = err
    while link is not None and reason is None:
        rust = re.search(r"\(os error (\d+)\)", str(link))  # how Rust's io::Error, hence safetensors, ends
        code = link.errno if isinstance(link, OSError) else int(rust[1]) if rust else None
        reason = _FULL.get(code or 0)
        link = link.__cause__ or link.__context__
    if reason is None and isinstance(err, OSError):
        if isinstance(err.filename, str | Path) and Path(err.filename) in (target, staging, *target.parents):
            reason = _PLACE.get(err.errno or 0)
    elif reason is None and staging is not None and staging.is_dir():
        reason = _FULL.get(_probe(staging) or 0)
    if reason is None:
        return None
    return StorageError(
        f"cannot write {target}: {reason}; mend that or choose another place, then run the same command "
        "again (nothing that was saved is lost)"
    )
