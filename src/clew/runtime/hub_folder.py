"""A folder of a hub repository on this disk: kept to one commit, every file checked, whole or absent.

    ROOT/models/OWNER--NAME/revisions.json         which commit a revision was when it was first asked for
    ROOT/models/OWNER--NAME/COMMIT/[SUBFOLDER/]    the files under their names in the repository
    ROOT/models/OWNER--NAME/.lock                  held by the process that downloads

A folder is ready when its manifest.json is there, which is written last, after every file's hash was compared
with the hub's. Until then its files are ones that a later call can use.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from clew.checkpoint import DamagedCheckpoint, read_manifest, write_file_atomic
from clew.checkpoint.durable import MANIFEST
from clew.errors import UserError

REVISIONS = "revisions.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubFolder:
    """A model folder of the hub and its place below ``root``.

    Attributes:
        repository: hub id, "owner/name".
        subfolder: path inside the repository; "" is the repository itself.
        revision: commit, tag or branch.
        root: folder that holds ``models/``.
    """

    repository: str
    subfolder: str
    revision: str
    root: Path

    @property
    def home(self) -> Path:
        """Everything of the repository that is here."""
        return self.root / "models" / self.repository.replace("/", "--")

    def checkout(self, commit: str) -> Path:
        """Where the repository's own paths begin."""
        return self.home / commit

    def folder(self, commit: str) -> Path:
        """The model folder."""
        return self.checkout(commit) / self.subfolder

    def __str__(self) -> str:
        return f"{self.repository}, folder {self.subfolder}" if self.subfolder else self.repository

    def commit(self) -> str | None:
        """The commit that the revision is kept to; None if it was never asked for.

        Raises:
            UserError: the record can't be read.
        """
        if _COMMIT.fullmatch(self.revision):
            return self.revision
        return self._recorded().get(self.revision)

    def keep_to(self, commit: str) -> None:
        """Records the commit of the revision, for good. Needs the lock."""
        if self.commit() != commit:
            text = json.dumps({**self._recorded(), self.revision: commit}, indent=1, sort_keys=True)
            write_file_atomic(self.home / REVISIONS, text + "\n")

    def _recorded(self) -> dict[str, str]:
        path = self.home / REVISIONS
        try:
            commits = json.loads(path.read_bytes())
            if not all(_COMMIT.fullmatch(commit) for commit in commits.values()):
                raise ValueError("no commits")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, AttributeError, TypeError) as error:
            raise UserError(f"{path} is damaged: delete it, and `clew prepare` asks the hub again") from error
        return dict(commits)

    def ready(self) -> Path | None:
        """The model folder if it was prepared: its manifest is there and all sizes agree (no file is read).

        Raises:
            UserError: it was whole once and is damaged.
        """
        commit = self.commit()
        if commit is None or not (self.folder(commit) / MANIFEST).is_file():
            return None
        folder = self.folder(commit)
        try:
            files = read_manifest(folder).files
        except DamagedCheckpoint as damage:
            raise UserError(f"{folder}: {damage.problems[0]}; `clew prepare` mends it") from damage
        wrong = [name for name, record in files.items() if size_of(folder / name) != record.size]
        if wrong:
            raise UserError(f"{folder / wrong[0]} is missing or has a wrong size; `clew prepare` mends it")
        return folder


def size_of(path: Path) -> int | None:
    """Bytes of a file; None if there is no file of that name."""
    return path.stat().st_size if path.is_file() else None
