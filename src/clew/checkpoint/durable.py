"""Files and directories that are whole or absent, whatever moment the process or the power dies at.

Order of `write_directory`: files, their fsync, folders' fsync, manifest, its fsync, the staging directory's
fsync, rename, the parent's fsync. Only the rename makes the name visible, and all it shows is on disk then.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clew.checkpoint.staging import (
    clean_staging,
    discard,
    fsync_path,
    make_directory,
    staging_path,
    write_all,
    write_error,
)
from clew.errors import UserError

__all__ = [
    "MANIFEST",
    "DamagedCheckpoint",
    "FileRecord",
    "Manifest",
    "append_jsonl",
    "clean_staging",
    "read_manifest",
    "truncate_jsonl",
    "verify",
    "write_directory",
    "write_file_atomic",
]

MANIFEST = "manifest.json"
_FORMAT = 1
log = logging.getLogger("clew.checkpoint")


class DamagedCheckpoint(UserError):
    """A saved directory is not what was written: `path`, and in `problems` each file with what is wrong."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.path, self.problems = path, problems
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        super().__init__(f"{path} is damaged: {'; '.join(problems[:3])}{more}; restore it from a copy or delete it")

    def __reduce__(self) -> tuple[type[DamagedCheckpoint], tuple[Path, list[str]]]:
        """It is raised in worker processes too, and pickled on its way from there."""
        return DamagedCheckpoint, (self.path, self.problems)


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows of a file: `size` in bytes, `sha256` in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Every file of a saved directory by its POSIX path inside it, and the caller's facts (plain JSON)."""

    files: dict[str, FileRecord]
    facts: dict[str, Any]

    def to_json(self) -> str:
        body = self._body()
        return json.dumps({**body, "sha256": _digest_of(body)}, indent=1) + "\n"

    def _body(self) -> dict[str, Any]:
        files = {name: {"size": rec.size, "sha256": rec.sha256} for name, rec in sorted(self.files.items())}
        return {"format": _FORMAT, "files": files, "facts": self.facts}


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """The manifest alone, checked against its own hash; the files are not looked at.

    Raises DamagedCheckpoint when it is missing, torn or changed.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        claimed = content.pop("sha256")
        files = {name: FileRecord(rec["size"], rec["sha256"]) for name, rec in content["files"].items()}
        manifest = Manifest(files, content["facts"])
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpoint(directory, [f"{MANIFEST} is missing"]) from None
    except PermissionError as err:
        raise UserError(f"cannot read {path}: no permission; run as the user who wrote it") from err
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise DamagedCheckpoint(directory, [f"{MANIFEST} cannot be read ({type(err).__name__})"]) from err
    if content.get("format") != _FORMAT:
        raise DamagedCheckpoint(directory, [f"{MANIFEST} has an unknown format {content.get('format')!r}"])
    if claimed != _digest_of(content):
        raise DamagedCheckpoint(directory, [f"{MANIFEST} does not match its own sha256"])
    return manifest


def verify(directory: Path) -> Manifest:
    """Check every file against the manifest: presence, size, sha256. Files that it does not list are ignored.

    Raises DamagedCheckpoint naming each file that is wrong and how, UserError if a file may not be read.
    """
    manifest = read_manifest(directory)
    problems: list[str] = []
    for check in (_size_problem, _hash_problem):  # all sizes first: they cost nothing
        for name, record in manifest.files.items():
            try:
                problem = check(directory / name, record)
            except (FileNotFoundError, NotADirectoryError):
                problem = "is missing"
            except PermissionError as err:
                raise UserError(f"cannot read {directory / name}: no permission") from err
            except OSError as err:
                if err.errno != errno.EIO:
                    raise
                problem = "cannot be read (input/output error)"
            if problem:
                problems.append(f"{name} {problem}")
        if problems:
            raise DamagedCheckpoint(directory, problems)
    return manifest


def _size_problem(path: Path, record: FileRecord) -> str | None:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        return "is not a file"
    return None if found.st_size == record.size else f"has {found.st_size} bytes instead of {record.size}"


def _hash_problem(path: Path, record: FileRecord) -> str | None:
    return None if _sha256(path) == record.sha256 else "has a wrong sha256 (its content changed)"


def write_directory(final: Path, writer: Callable[[Path], None], facts: dict[str, Any]) -> Path:
    """Make the directory `final` out of what `writer` puts into the empty directory it is given.

    `facts` (JSON, deterministic) go into the manifest. Returns `final`. A whole directory of that name is
    never changed: the same content again is a no-op, other content (files or facts) is a UserError. A damaged
    one is moved to NAME.damaged-N first. A full disk or an unwritable place is a UserError with nothing left.
    """
    final = Path(os.path.abspath(final))
    facts = json.loads(json.dumps(facts, allow_nan=False))
    staging = staging_path(final)
    try:
        make_directory(final.parent)
        staging.mkdir()
        writer(staging)
        _publish(staging, final, _seal(staging, facts))
    except BaseException as err:
        clear = write_error(err, final, staging)
        discard(staging)
        if clear is None:
            raise
        raise clear from err
    return final


def _seal(staging: Path, facts: dict[str, Any]) -> Manifest:
    """Flush everything below `staging`, then write the manifest, the last file, and flush that."""
    files: dict[str, FileRecord] = {}
    for folder, folders, names in os.walk(staging, topdown=False):  # a folder comes after its content
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for path in (Path(folder, name) for name in (*names, *links)):
            if not stat.S_ISREG(path.lstat().st_mode) or path == staging / MANIFEST:
                raise ValueError(f"the writer left {path.name}, which is no regular file or reserved")
            fsync_path(path)
            record = FileRecord(path.stat().st_size, _sha256(path))
            files[path.relative_to(staging).as_posix()] = record
        if Path(folder) != staging:
            fsync_path(Path(folder))
    manifest = Manifest(files, facts)
    _write_synced(staging / MANIFEST, manifest.to_json().encode())
    fsync_path(staging)
    return manifest


def _publish(staging: Path, final: Path, manifest: Manifest) -> None:
    """Give `staging` its final name; an empty directory of that name is replaced by the rename itself."""
    while True:
        try:
            os.rename(staging, final)
            break
        except OSError as err:
            if err.errno == errno.ENOTDIR:
                raise UserError(f"cannot write {final}: it exists and is no directory; remove it") from err
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            existing = verify(final)
        except DamagedCheckpoint as damage:
            # Kept, not deleted: without our manifest it may be something else that a user put there.
            aside = next(p for n in range(1, 10**6) if not (p := Path(f"{final}.damaged-{n}")).exists())
            with contextlib.suppress(FileNotFoundError):  # another writer was faster; look again
                os.rename(final, aside)
                log.warning("%s; moved to %s and written anew", damage, aside.name)
            continue
        if existing != manifest:
            changed = {n for n in existing.files.keys() | manifest.files.keys()
                       if existing.files.get(n) != manifest.files.get(n)}  # fmt: skip
            raise UserError(
                f"{final} already holds other content ({', '.join(sorted(changed)[:3]) or 'other facts'}) "
                "and a saved directory is never overwritten; use another name, or delete it first"
            )
        discard(staging)
        break
    fsync_path(final.parent)


def _write_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file_atomic(path: Path, data: bytes | str) -> None:
    """Replace the file `path` as a whole (text as UTF-8): readers see the old or the new content, no mix."""
    path = Path(os.path.abspath(path))
    staging = staging_path(path)
    try:
        make_directory(path.parent)
        _write_synced(staging, data.encode() if isinstance(data, str) else data)
        os.replace(staging, path)
        fsync_path(path.parent)
    except BaseException as err:
        discard(staging)
        if (clear := write_error(err, path, staging)) is None:
            raise
        raise clear from err


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for both."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def append_jsonl(path: Path, obj: dict[str, Any]) -> None:
    """Append one JSON line; on return it is on the device. NaN and infinities are written as null.

    A torn last line left by a killed process is dropped first. A line that does not fit on the disk leaves
    the file as it was (UserError).
    """
    path = Path(os.path.abspath(path))
    line = (json.dumps(_finite(obj), allow_nan=False) + "\n").encode()
    try:
        make_directory(path.parent)
        new = not path.exists()
        if not new and _ends_torn(path):
            truncate_jsonl(path, lambda _: True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            before = os.fstat(descriptor).st_size
            try:
                write_all(descriptor, line)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
        if new:
            fsync_path(path.parent)
    except OSError as err:
        if (clear := write_error(err, path)) is None:
            raise
        raise clear from err


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def truncate_jsonl(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Drop, in one atomic replacement, a torn last line and every object that `keep` refuses.

    Kept lines stay byte for byte. Returns the number of lines dropped; a missing file is 0. A line before the
    last one that is no JSON object is no trace of a crash: UserError, nothing changed.
    """
    if not path.exists():
        return 0
    raw = path.read_bytes()
    lines = raw.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            obj = json.loads(line)
            if not isinstance(obj, dict):
                raise ValueError("not an object")
        except ValueError as err:
            if number < len(lines):
                raise UserError(f"{path} line {number} is no JSON object; remove that line") from err
            continue
        if keep(obj):
            kept.append(line)
    content = b"".join(line + b"\n" for line in kept)
    if content != raw:
        write_file_atomic(path, content)
    return len(lines) - len(kept)
