"""SkyRL's checkpoints (0.4.0), looked at before SkyRL goes on from one.

    CHECKPOINTS/latest_ckpt_global_step.txt                     the step to go on from; written last, not atomically
    CHECKPOINTS/global_step_N/policy/KIND_world_size_W_rank_R.pt    KIND: model, optim, extra_state; one of each a rank
    CHECKPOINTS/global_step_N/{data.pt,trainer_state.pt}        data position; written after the policy

SkyRL writes them in place and checks little: it goes on without an optimizer state or a data position that is missing,
raises on an empty ``latest`` file, and counts partial folders when it deletes old ones. Shards are looked at for being
there and for their ends; damage inside of one, behind which its end still fits, is not found here.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clew.checkpoint import write_file_atomic
from clew.errors import UserError

LATEST = "latest_ckpt_global_step.txt"
PREFIX = "global_step_"
ASIDE = "set-aside-"
"""First part of the name of what was moved out of SkyRL's way; SkyRL looks at names that begin with ``PREFIX``."""

_KINDS = ("model", "optim", "extra_state")
_SHARD = re.compile(rf"({'|'.join(_KINDS)})_world_size_(\d+)_rank_(\d+)\.pt")
_SMALL = ("trainer_state.pt", "data.pt")  # read in full; of the others, only whether their end is there


@dataclass(frozen=True)
class Checkpoint:
    """A folder ``global_step_N``.

    Attributes:
        folder: it.
        step: N; None if the name has no number.
        ranks: world size of which all shards are there; None if there is no such.
        problems: what is missing or damaged, files by their names inside the folder; empty: it is whole.
    """

    folder: Path
    step: int | None
    ranks: int | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Resume:
    """Where SkyRL will go on.

    Attributes:
        step: of the newest whole checkpoint; 0: from the start.
        notes: what was found wrong and done about it.
    """

    step: int
    notes: tuple[str, ...]


def prepare_resume(folder: Path, ranks: int, exports: Path | None = None) -> Resume:
    """Makes a checkpoint folder one that SkyRL goes on from rightly; nothing is deleted.

    Partial checkpoints are renamed (``ASIDE``), and ``latest`` names the newest whole one.

    Args:
        folder: SkyRL's ``ckpt_path``; need not exist.
        ranks: policy workers of the run that goes on.
        exports: SkyRL's ``export_path``: what is in it was trained, so that the run can't be at its beginning.

    Raises:
        UserError: the newest whole checkpoint is of another number of ranks; or steps were trained, and no checkpoint
            of them is whole; or the ``latest`` file can't be read.
    """
    found = list(checkpoints(folder, ranks))
    whole = [c for c in found if not c.problems]
    newest = max(whole, key=lambda c: c.step or 0, default=None)
    named = _named(folder)
    if newest is None and named:
        place = folder / f"{PREFIX}{named}"
        problem = next((c.problems[0] for c in found if c.folder == place), "it is gone")
        raise UserError(
            f"{place}: SkyRL finished this checkpoint, and now {problem}; restore it from a copy, or start again with "
            "--fresh"
        )
    if newest is None and exports is not None and (trained := sorted(exports.glob(f"{PREFIX}*"))):
        raise UserError(
            f"{folder} holds no whole checkpoint, and there are exports of steps that were trained ({trained[0]}): "
            "restore a checkpoint from a copy, or start again with --fresh"
        )
    if newest is not None and newest.ranks != ranks:
        raise UserError(
            f"{newest.folder} was saved by {newest.ranks} policy workers, and SkyRL can't spread it over {ranks} "
            "(runtime.nodes times runtime.workers_per_node): use as many as before"
        )
    notes = [
        f"{c.folder.name} is not whole ({c.problems[0]}): it is kept as {_set_aside(c.folder).name}"
        for c in found
        if c.problems
    ]
    step = newest.step or 0 if newest else 0
    if newest is not None and named != step:
        write_file_atomic(folder / LATEST, str(step))
        notes.append(f"{LATEST} named {'nothing' if named is None else f'step {named}'}: it names step {step} now")
    elif newest is None and (folder / LATEST).exists():
        notes.append(f"{LATEST} names no checkpoint: it is kept as {_set_aside(folder / LATEST).name}")
    return Resume(step, tuple(notes))


def checkpoints(folder: Path, ranks: int) -> Iterator[Checkpoint]:
    """Every checkpoint in SkyRL's ``ckpt_path``, whole or not, by step.

    Args:
        ranks: the world size to prefer where the shards of several are there.
    """
    entries = [e for e in folder.iterdir() if e.is_dir() and e.name.startswith(PREFIX)] if folder.is_dir() else []
    looked_at = (_look_at(entry, ranks) for entry in entries)
    yield from sorted(looked_at, key=lambda c: (-1 if c.step is None else c.step, c.folder.name))


def _look_at(folder: Path, wanted: int) -> Checkpoint:
    number = folder.name.removeprefix(PREFIX)
    if not re.fullmatch(r"0|[1-9]\d{0,17}", number, re.ASCII):
        return Checkpoint(folder, None, None, ("its name holds no step, which SkyRL can't read",))
    ranks, problems = _look_at_shards(folder / "policy", wanted)
    for name in _SMALL:
        if problem := _archive_problem(folder / name, every_byte=True):
            problems.append(f"{name} {problem}")
    return Checkpoint(folder, int(number), ranks, tuple(problems))


def _look_at_shards(policy: Path, wanted: int) -> tuple[int | None, list[str]]:
    """The world size whose shards are all there (``wanted`` before others), and what is wrong with those that are."""
    shards: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for entry in policy.iterdir() if policy.is_dir() else ():
        if match := _SHARD.fullmatch(entry.name):
            shards[int(match[2])].add((match[1], int(match[3])))
    if not shards:
        return None, ["policy/ holds no shards"]
    missing = {
        size: {(kind, rank) for kind in _KINDS for rank in range(size)} - there for size, there in shards.items()
    }
    size = min(missing, key=lambda size: (len(missing[size]), size != wanted, -size))
    if missing[size]:
        kind, rank = min(missing[size])
        return None, [f"policy/{_shard(kind, size, rank)} is missing"]
    problems = []
    for kind, rank in sorted(shards[size]):
        name = _shard(kind, size, rank)
        if rank < size and (problem := _archive_problem(policy / name)):
            problems.append(f"policy/{name} {problem}")
    return size, problems


def _shard(kind: str, size: int, rank: int) -> str:
    return f"{kind}_world_size_{size}_rank_{rank}.pt"


def _archive_problem(path: Path, every_byte: bool = False) -> str | None:
    """What is wrong with a file of ``torch.save``: a ZIP archive, its directory at the end. Nothing is unpickled.

    Args:
        every_byte: compare the checksums of the contents too; else the end has to be there and to fit the size.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if every_byte and (bad := archive.testzip()) is not None:
                return f"is damaged ({bad})"
    except FileNotFoundError:
        return "is missing"
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        return f"is cut short or damaged ({error})"
    return None


def _named(folder: Path) -> int | None:
    """The step in the ``latest`` file; None if it is missing, empty or no number."""
    try:
        text = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    except OSError as error:
        raise UserError(
            f"{folder / LATEST} can't be read ({error.strerror}): move it away, and the newest whole checkpoint is used"
        ) from error
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else None


def _set_aside(path: Path) -> Path:
    aside = next(p for n in range(1, 10**6) if not (p := path.with_name(f"{ASIDE}{path.name}-{n}")).exists())
    os.rename(path, aside)
    return aside
