"""A run directory before training touches it: new, to be continued, finished, or somebody else's."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from clew.checkpoint import RunLock, write_file_atomic
from clew.checkpoint.lock import LOCK_NAME
from clew.checkpoint.staging import PREFIX
from clew.errors import UserError
from clew.recipe import Recipe, differences, load_recipe

RECIPE, SUMMARY = "recipe.toml", "summary.json"
# Whatever of these exists was computed under the recipe in the directory.
_RESULTS = ("checkpoints", "adapters", "eval", "metrics.jsonl", SUMMARY)

log = logging.getLogger(__name__)


def default_run_dir(recipe: Recipe) -> Path:
    """``runs/RECIPE-seedN`` below ``runtime.shared_dir``, or below the working directory."""
    return Path(recipe.runtime.shared_dir or ".") / "runs" / f"{file_name(recipe)}-seed{recipe.training.seed}"


def file_name(recipe: Recipe) -> str:
    """The recipe's name with nothing in it that a file's name can't have."""
    return re.sub(r"[^\w.-]+", "-", recipe.name).strip("-.") or "recipe"


def has_results(run_dir: Path) -> bool:
    """Whether a run has computed anything here that a changed recipe would not agree with."""
    return any((run_dir / name).exists() for name in _RESULTS)


def check_run_dir(run_dir: Path, option: str = "--run") -> None:
    """Refuses a path that is no place for a run; ``option`` is how the user named it.

    Raises:
        UserError: it is a file, or a folder that holds other things.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{option} {run_dir} is a file: name a folder, new or of an earlier run")
    if not run_dir.is_dir() or (run_dir / RECIPE).is_file():
        return
    others = sorted(e.name for e in run_dir.iterdir() if e.name != LOCK_NAME and not e.name.startswith(PREFIX))
    if others:
        raise UserError(
            f"{option} {run_dir} holds other things ({', '.join(others[:3])}) and no {RECIPE}: "
            "name a new folder, or one of an earlier run"
        )


def refuse_changed_recipe(
    recipe: Recipe, run_dir: Path, remedy: str = "choose another --run, or start again with --fresh"
) -> None:
    """Compares a recipe with that of the run in the directory, if anything was computed there.

    Raises:
        UserError: names the keys that differ and may not.
    """
    if not (run_dir / RECIPE).is_file() or not has_results(run_dir):
        return
    try:
        own = load_recipe(str(run_dir / RECIPE))
    except UserError as error:
        raise UserError(f"{error}: it is the recipe of the run there; restore it from a copy, or {remedy}") from error
    changed = differences(own, recipe)
    if changed:
        raise UserError(f"{run_dir} holds a run of another recipe ({'; '.join(changed)}): undo the change, {remedy}")


def finished_summary(recipe: Recipe, run_dir: Path) -> dict[str, Any] | None:
    """The summary of a finished run, or None if there is something left to do."""
    path = run_dir / SUMMARY
    if not path.is_file():
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text())
        steps = summary["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s can't be read (%s) and is made anew", path, error)
        return None
    return summary if steps == recipe.training.steps else None


def adopt(recipe: Recipe, run_dir: Path) -> None:
    """Makes the directory this recipe's: its recipe.toml, and no summary of fewer steps. Needs the lock.

    Raises:
        UserError: the run there has another recipe.
    """
    refuse_changed_recipe(recipe, run_dir)
    path, text = run_dir / RECIPE, recipe.to_toml()
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_file_atomic(path, text)
    if finished_summary(recipe, run_dir) is None:
        (run_dir / SUMMARY).unlink(missing_ok=True)


def set_aside(run_dir: Path) -> Path | None:
    """Renames a run directory to NAME.old-N, so that nothing saved is lost; None if there is none.

    Raises:
        UserError: another process is writing it.
    """
    if not run_dir.exists():
        return None
    run_dir = Path(os.path.abspath(run_dir))
    if Path.cwd().is_relative_to(run_dir.resolve()):  # renamed, it would stay what this process calls "."
        raise UserError(f"--fresh renames {run_dir}, in which this command was started: start it from outside")
    with RunLock(run_dir):
        aside = next(p for n in range(1, 10**6) if not (p := Path(f"{run_dir}.old-{n}")).exists())
        os.rename(run_dir, aside)
    return aside
