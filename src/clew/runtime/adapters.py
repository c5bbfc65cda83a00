"""The adapters that a run has exported: which is best, and a copy to serve from."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from clew.checkpoint import read_manifest, verify, write_directory
from clew.checkpoint.durable import MANIFEST
from clew.errors import UserError
from clew.runtime.run_directory import RECIPE

_STEP = re.compile(r"step-(\d{6,})")


def exported_steps(run_dir: Path) -> list[int]:
    """Steps whose adapter is exported, oldest first.

    Raises:
        UserError: the folder is no run directory.
    """
    if not (run_dir / RECIPE).is_file():
        raise UserError(f"{run_dir} is no run directory (it has no {RECIPE}): give the folder that clew train wrote")
    folder = run_dir / "adapters"
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for entry in folder.iterdir() if (match := _STEP.fullmatch(entry.name)))


def find_adapter(run_dir: Path, step: str) -> tuple[int, Path]:
    """The step and the verified folder of an exported adapter.

    Args:
        step: a number, or ``best``: the evaluated step that solved most of the held-out set (the earliest
            of equals).

    Raises:
        UserError: there is none, or it is damaged.
    """
    steps = exported_steps(run_dir)
    if not steps:
        raise UserError(f"{run_dir} has exported no adapter yet: go on with clew train until it has")
    if step == "best":
        number = _best(run_dir, steps)
    elif step.isdecimal() and len(step) < 19:
        number = int(step)
    else:
        raise UserError(f'--step {step}: give "best" or the number of a step')
    if number not in steps:
        raise UserError(f"--step {step}: {run_dir} has no adapter of that step; there are {', '.join(map(str, steps))}")
    folder = run_dir / "adapters" / f"step-{number:06d}"
    verify(folder)
    return number, folder


def _best(run_dir: Path, steps: list[int]) -> int:
    from clew.training.run_state import read_jsonl

    rates = {
        line["step"]: line["eval/all/pass_at_1"]
        for line in read_jsonl(run_dir / "metrics.jsonl", "step")
        if "eval/all/pass_at_1" in line and line["step"] in steps
    }
    if not rates:
        raise UserError(f"--step best: {run_dir} has evaluated no adapter yet; there are {', '.join(map(str, steps))}")
    return min(rates, key=lambda step: (-rates[step], step))


def copy_adapter(run_dir: Path, step: str, to: Path) -> Path:
    """Copies an exported adapter, whole or not at all, with its card and manifest; returns the new folder.

    Raises:
        UserError: there is no such adapter, or ``to`` holds something else.
    """
    _, source = find_adapter(run_dir, step)
    facts = read_manifest(source).facts  # its files were verified when it was found
    if Path(os.path.abspath(source.parent)) in Path(os.path.abspath(to)).parents:
        raise UserError(f"--to {to} is among the adapters of the run itself: name a folder elsewhere")
    if to.is_dir() and not (to / MANIFEST).exists() and (others := sorted(e.name for e in to.iterdir())):
        raise UserError(f"--to {to} holds other things ({', '.join(others[:3])}): name a new or an empty folder")

    def write(staging: Path) -> None:
        shutil.copytree(source, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))

    return write_directory(to, write, facts)
