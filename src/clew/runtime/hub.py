"""Downloads a folder of a hub repository: one process at a time, every file checked, whole or absent."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest, sha1
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError  # of httpx or httpx2, as this release of the library has it
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils import tqdm as hub_tqdm
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from clew import __version__
from clew.checkpoint import (
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    RunLock,
    verify,
    write_file_atomic,
)
from clew.checkpoint.durable import MANIFEST
from clew.checkpoint.staging import fsync_path, make_directory, remove
from clew.errors import UserError
from clew.runtime.hub_errors import WrongContent, explain, passing, short
from clew.runtime.hub_folder import HubFolder, size_of

_PAUSES_S = (1.0, 2.0, 4.0)  # before each further attempt at what failed for a reason that passes
_WAIT_S = 0.5  # between two looks at a lock that another process holds

Say = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Fetched:
    """What ``fetch`` found or made.

    Attributes:
        folder: the model folder.
        size: bytes of its files.
        files, downloaded: how many files it has, and how many of them this call downloaded.
    """

    folder: Path
    commit: str
    size: int
    files: int
    downloaded: int


def fetch(source: HubFolder, console: Console, say: Say) -> Fetched:
    """Makes a folder of the hub ready; downloads only what is not here yet, or no longer what it was.

    One process at a time downloads from a repository to a place: others wait, and then find it done. A call that
    was killed is gone on with by the next one: files that were complete are checked and kept.

    Args:
        console: where the progress is shown (on a terminal).
        say: prints a line.

    Raises:
        UserError: no network, no access, no such repository, revision or folder, a full disk.
    """
    with _WaitingLock(source.home, say):
        commit = source.commit()
        if commit is not None and (source.folder(commit) / MANIFEST).exists():
            try:
                return _fetched(source, commit, verify(source.folder(commit)), downloaded=0)
            except DamagedCheckpoint as damage:
                for problem in damage.problems:
                    say(f"damaged: {source.folder(commit)}: {problem}; downloading it again")
        with _quiet_library():
            return _download(source, commit, console, say)


def _download(source: HubFolder, commit: str | None, console: Console, say: Say) -> Fetched:
    api = HfApi(library_name="clew", library_version=__version__)
    with _one_line_errors(source, api.endpoint):
        if commit is None:
            found = _again(lambda: api.model_info(source.repository, revision=source.revision).sha, "the hub", say)
            assert found is not None  # the hub names the commit of every revision
            commit = found
        files = _listing(api, source, commit)
        source.keep_to(commit)
        checkout, folder = source.checkout(commit), source.folder(commit)
        make_directory(folder)
        # The library's notes and the torn files of a killed call: their content is known by its hashes here.
        _remove_notes(checkout)
        records = {file.path: _record(checkout / file.path, file) for file in files}
        missing = [file for file in files if records[file.path] is None]
        needed = sum(file.size for file in missing)
        _check_room(checkout, needed)
        say(f"downloading {len(missing)} of {len(files)} files, {decimal(needed)}, to {folder}")
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        name = TextColumn("{task.description}", markup=False)
        with Progress(name, *columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            done = 0
            task = progress.add_task("", total=needed)

            def received(size: int) -> None:
                progress.update(task, completed=done + size)

            for file in missing:
                progress.update(task, description=file.path)
                records[file.path] = _download_file(api, source, commit, file, received, say)
                done += file.size
                say(f"  {file.path} ({decimal(file.size)})")
        _remove_notes(checkout)
    prefix = f"{source.subfolder}/" if source.subfolder else ""
    manifest = Manifest(
        {path.removeprefix(prefix): record for path, record in records.items() if record is not None},
        {"repository": source.repository, "commit": commit, "subfolder": source.subfolder},
    )
    _publish(folder, manifest)
    return _fetched(source, commit, manifest, len(missing))


def _fetched(source: HubFolder, commit: str, manifest: Manifest, downloaded: int) -> Fetched:
    size = sum(record.size for record in manifest.files.values())
    return Fetched(source.folder(commit), commit, size, len(manifest.files), downloaded)


def _listing(api: HfApi, source: HubFolder, commit: str) -> list[RepoFile]:
    """The files to have, as the hub knows them (size, hashes).

    Raises:
        UserError: there is no such folder, or no model in it.
    """
    tree = api.list_repo_tree(source.repository, recursive=True, revision=commit)
    files = [entry for entry in tree if isinstance(entry, RepoFile)]
    prefix = f"{source.subfolder}/" if source.subfolder else ""
    # A file of the manifest's name could not be told from the manifest; no model needs one.
    wanted = [file for file in files if file.path.startswith(prefix) and Path(file.path).name != MANIFEST]
    if f"{prefix}config.json" not in {file.path for file in wanted}:
        what = f"model in its folder {source.subfolder}" if source.subfolder else "model in its top folder"
        what = what if wanted else f"folder {source.subfolder}"
        folders = sorted(Path(file.path).parent.as_posix() for file in files if Path(file.path).name == "config.json")
        named = ["the top folder (leave the key out)" if folder == "." else folder for folder in folders[:5]]
        there = f"it has models in: {', '.join(named)}" if named else "nor has it one anywhere else"
        raise UserError(f"model.subfolder: {source.repository} has no {what} at commit {commit[:12]}; {there}")
    for file in wanted:
        if ".." in Path(file.path).parts:
            raise UserError(f"model.path: {source.repository} lists a file outside itself ({file.path}): don't use it")
    return wanted


def _download_file(
    api: HfApi, source: HubFolder, commit: str, file: RepoFile, received: Callable[[int], None], say: Say
) -> FileRecord:
    """Downloads a file (again) until its hash is right.

    Args:
        received: told how many bytes of it have arrived.

    Raises:
        WrongContent: it arrives damaged every time.
    """
    checkout = source.checkout(commit)
    attempts = itertools.count()

    def attempt() -> FileRecord:
        (checkout / file.path).unlink(missing_ok=True)
        api.hf_hub_download(
            source.repository,
            file.path,
            revision=commit,
            local_dir=checkout,
            # The library copies from its cache what is there; only if that was damaged, it looks where nothing is.
            cache_dir=None if next(attempts) == 0 else checkout / ".cache" / "none",
            tqdm_class=_counter(received),
        )
        record = _record(checkout / file.path, file)
        if record is None:
            raise WrongContent(file.path)
        return record

    return _again(attempt, file.path, say)


def _record(path: Path, file: RepoFile) -> FileRecord | None:
    """Size and sha256 of a file that is what the hub has; None if it is missing, or anything else."""
    if size_of(path) != file.size:
        return None
    with path.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    if file.lfs is not None:
        return FileRecord(file.size, digest) if digest == file.lfs.sha256 else None
    # Small files lie in git itself, whose hash is over this header and the content.
    blob = sha1(f"blob {file.size}\0".encode() + path.read_bytes()).hexdigest()
    return FileRecord(file.size, digest) if blob == file.blob_id else None


def _publish(folder: Path, manifest: Manifest) -> None:
    """Flushes everything, then writes the manifest, which makes the folder ready."""
    paths = [folder / name for name in manifest.files]
    for path in paths:
        fsync_path(path)
    for parent in sorted({parent for path in paths for parent in path.parents if parent.is_relative_to(folder)}):
        fsync_path(parent)
    write_file_atomic(folder / MANIFEST, manifest.to_json())


def _remove_notes(checkout: Path) -> None:
    if (checkout / ".cache").exists():
        remove(checkout / ".cache")


def _check_room(place: Path, needed: int) -> None:
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"{place} has {decimal(free)} free and the model needs {decimal(needed)} more: free some space, or "
            "choose another place with --to or runtime.shared_dir"
        )


def _again(action: Callable[[], T], what: str, say: Say) -> T:
    """Does something, again after a pause if it failed for a reason that may pass."""
    for pause in _PAUSES_S:
        try:
            return action()
        except (HTTPError, OSError, RuntimeError) as error:  # the last is how hf_xet fails
            if not passing(error):
                raise
            say(f"{what}: {short(error)}; trying again in {pause:g} s")
            time.sleep(pause)
    return action()


def _counter(received: Callable[[int], None]) -> type[hub_tqdm]:
    """The progress bar that the library is given: it shows nothing and counts."""

    class Counter(hub_tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.count = int(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self.count += int(n or 0)
            received(self.count)

        # Having these two makes the library count what crosses the network apart from what reaches the disk.
        def update_transfer(self, n: float | None = 1) -> None:
            pass

        def set_transfer_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            pass

    return Counter


class _WaitingLock(RunLock):
    """A lock that waits for the process that holds it, and says so once."""

    def __init__(self, folder: Path, say: Say) -> None:
        super().__init__(folder)
        self._say, self._said = say, False

    def _refuse(self, waited_s: float) -> None:
        try:
            super()._refuse(waited_s)
        except UserError as holder:
            if not self._said:
                self._say(f"waiting: {str(holder).partition(';')[0]}")
                self._said = True
            time.sleep(_WAIT_S)


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Its warnings name addresses that are signed; what they say is said here."""
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


@contextmanager
def _one_line_errors(source: HubFolder, endpoint: str) -> Iterator[None]:
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        clear = explain(error, source.repository, source.revision, source.home, endpoint)
        if clear is None:
            raise
        raise clear from error
