"""The adapters that a run has exported: which is best, and a copy to serve from."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clew.checkpoint import read_manifest, verify, write_directory
from clew.checkpoint.durable import MANIFEST
from clew.errors import UserError
from clew.recipe import load_recipe
from clew.runtime.run_directory import RECIPE
from clew.runtime.skyrl import exports as skyrl

_STEP = re.compile(r"step-(\d{6,})")


def exported_steps(run_dir: Path) -> list[int]:
    """Steps whose adapter is exported, oldest first.

    Raises:
        UserError: the folder is no run directory.
    """
    if not (run_dir / RECIPE).is_file():
        raise UserError(f"{run_dir} is no run directory (it has no {RECIPE}): give the folder that clew train wrote")
    if skyrl.is_skyrl_run(run_dir):
        return list(skyrl.exported(run_dir))
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
    if skyrl.is_skyrl_run(run_dir):
        return number, skyrl.adapter_folder(skyrl.exported(run_dir)[number])
    folder = run_dir / "adapters" / f"step-{number:06d}"
    verify(folder)
    return number, folder


def _best(run_dir: Path, steps: list[int]) -> int:
    from clew.training.run_state import read_jsonl

    if skyrl.is_skyrl_run(run_dir):
        heldout = load_recipe(str(run_dir / RECIPE)).evaluation.suites[0]
        rates = {step: rate for step, rate in skyrl.solve_rates(run_dir, heldout).items() if step in steps}
    else:
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
    left_out: Callable[[Any, list[str]], set[str]]
    if skyrl.is_skyrl_run(run_dir):
        facts, left_out = skyrl.adapter_facts(source), skyrl.all_but_adapter
    else:  # its files were verified when it was found
        facts, left_out = read_manifest(source).facts, shutil.ignore_patterns(MANIFEST)
    if Path(os.path.abspath(source.parent)) in Path(os.path.abspath(to)).parents:
        raise UserError(f"--to {to} is among the adapters of the run itself: name a folder elsewhere")
    if to.is_dir() and not (to / MANIFEST).exists() and (others := sorted(e.name for e in to.iterdir())):
        raise UserError(f"--to {to} holds other things ({', '.join(others[:3])}): name a new or an empty folder")

    def write(staging: Path) -> None:
        shutil.copytree(source, staging, dirs_exist_ok=True, ignore=left_out)

    return write_directory(to, write, facts)


def find_subject(model: str | None, adapter: Path | None) -> tuple[str | None, Path | None]:
    """The model and the adapter that two paths of the command line mean, SkyRL's exports among them.

    An export that holds only an adapter looks like a model folder: it stands for its base model and itself.

    Raises:
        UserError: an adapter on top of an adapter, or a whole model where an adapter is wanted.
    """
    if adapter is not None and (found := skyrl.find_export(adapter)) is not None:
        adapter = skyrl.adapter_folder(found)
    if model is None or not Path(model).is_dir() or (found := skyrl.find_export(Path(model))) is None:
        return model, adapter
    if found.kind == "model":
        return (model if found.folder == Path(model) else str(found.folder)), adapter
    if adapter is not None:
        raise UserError(f"--model {model} is an adapter itself, of {found.base}: give that as --model")
    if found.base is None:
        raise UserError(
            f"--model {model} is an adapter that names no base model: give it as --adapter, and --model too"
        )
    return found.base, found.folder
