"""The checkpoints of a run: step-000020, step-000040, ... and which of them to go on from."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from clew.checkpoint.durable import MANIFEST, DamagedCheckpoint, Manifest, verify, write_directory
from clew.checkpoint.staging import clean_staging, fsync_path, remove, staging_path
from clew.errors import UserError

log = logging.getLogger("clew.checkpoint")
_STEP = re.compile(r"step-(\d{6,})")
_Stamp = tuple[tuple[str, int, int, int], ...]


class CheckpointStore:
    """Saves, finds and retires checkpoints below `root`; `keep` whole ones stay (None: all of them).

    Opening a store touches nothing on the disk. One process at a time may save: hold a RunLock.
    """

    def __init__(self, root: Path, keep: int | None) -> None:
        if keep is not None and keep < 1:
            raise UserError(f"checkpoint.keep is {keep}: it must be at least 1 (leave it out to keep all)")
        self.root, self.keep = Path(os.path.abspath(root)), keep
        # Hashing gigabytes at every save to count whole checkpoints would stall training: a directory hashed
        # once by this process is hashed again only if a file's inode, size or time changed.
        self._verified: dict[int, tuple[_Stamp, Manifest]] = {}

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` lives, saved or not."""
        return self.root / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps that have a directory, oldest first; `load` and `latest` say whether they are whole."""
        if not self.root.is_dir():
            return []
        found = ((_STEP.fullmatch(entry.name), entry) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match, entry in found if match and entry.is_dir())

    def save(
        self,
        step: int,
        writer: Callable[[Path], None],
        facts: dict[str, Any],
        protected: Collection[int] = (),
    ) -> Path:
        """Save what `writer` puts into the directory it is given as checkpoint `step`, then apply retention.

        Never removed: the newest `keep` whole checkpoints, `protected` steps (say, the best), damaged ones.
        UserError if the disk is full or closed to us, or if `step` is saved already with other content; what
        was saved before is untouched then.
        """
        clean_staging(self.root)
        final = write_directory(self.path(step), writer, {**facts, "step": step})
        self._check(step)
        self._retire(protected)
        return final

    def load(self, step: int) -> tuple[Path, dict[str, Any]]:
        """The verified directory of `step` and its facts; UserError: none, DamagedCheckpoint: not whole."""
        if step not in (known := self.steps()):
            raise UserError(f"no checkpoint of step {step} in {self.root}; there are: {known or 'none'}")
        return self.path(step), self._check(step).facts

    def latest(self) -> tuple[int, Path] | None:
        """The newest whole checkpoint, hashes checked; damaged ones are skipped, each with a warning."""
        return next(((step, self.path(step)) for step in self._whole()), None)

    def _whole(self) -> Iterator[int]:
        """Whole checkpoints, newest first, checked only as far as the caller asks."""
        for step in reversed(self.steps()):
            try:
                self._check(step)
            except DamagedCheckpoint as damage:
                log.warning("checkpoint skipped: %s", damage)
                continue
            yield step

    def _check(self, step: int) -> Manifest:
        stamp = self._stamp(step)
        cached = self._verified.get(step)
        if cached is not None and cached[0] == stamp:
            return cached[1]
        manifest = verify(self.path(step))
        if manifest.facts.get("step") != step:
            raise DamagedCheckpoint(self.path(step), [f"{MANIFEST} says step {manifest.facts.get('step')}"])
        self._verified[step] = (stamp, manifest)
        return manifest

    def _stamp(self, step: int) -> _Stamp:
        found = []
        for folder, _, names in os.walk(self.path(step)):
            for path in (os.path.join(folder, name) for name in names):
                entry = os.lstat(path)
                found.append((path, entry.st_ino, entry.st_size, entry.st_mtime_ns))
        return tuple(sorted(found))

    def _retire(self, protected: Collection[int]) -> None:
        if self.keep is None:
            return
        surplus = list(self._whole())[self.keep :]
        for step in sorted(set(surplus) - set(protected)):  # oldest first, should we die on the way
            # Renamed before its files go, so that its name never shows a partial checkpoint.
            doomed = staging_path(self.path(step))
            try:
                os.rename(self.path(step), doomed)
                fsync_path(self.root)
                remove(doomed)
            except OSError as err:
                log.warning("old checkpoint %s could not be removed: %s", self.path(step), err)
