"""``clew eval``: from options to a subject, and the table at the end."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from clew.checkpoint import write_file_atomic
from clew.console import say
from clew.errors import UserError
from clew.evaluation.evaluate import Result
from clew.recipe import Recipe, load_recipe
from clew.report.progress import Progress
from clew.runtime.adapters import exported_steps, find_adapter, find_subject
from clew.runtime.process import check_parts, check_supported, located, prepare_process
from clew.runtime.run_directory import RECIPE


def run_eval(
    overrides: list[str],
    run: Path | None,
    model: str | None,
    adapter: Path | None,
    suite: str | None,
    policy: str,
    json_file: Path | None,
) -> None:
    """Evaluates a run's best adapter, a model folder or a reference policy.

    Raises:
        UserError: options that do not go together, or a part that is missing.
    """
    if run is not None and model is not None:
        raise UserError("--run and --model exclude each other: a run knows its model")
    if run is None and model is None and policy == "model":
        raise UserError("give --run DIR or --model PATH, or a --policy that needs no model")
    if json_file is not None:
        refuse_unwritable(json_file)
    model, adapter = find_subject(model, adapter)
    recipe, step = _recipe(overrides, run, model, suite), 0
    check_supported(recipe)
    if run is not None and policy == "model" and adapter is None:
        step, adapter = find_adapter(run, "best")
    prepare_process(recipe)
    check_parts(recipe)
    if policy == "model":
        recipe = located(recipe)
    from clew.runtime.evaluation import Subject, evaluate_subject, record

    console = Console()
    progress = Progress(recipe.training.steps, console, heldout=recipe.evaluation.suites[0])
    subject = Subject(policy, adapter, step)
    results = evaluate_subject(
        recipe,
        subject,
        lambda r: progress.evaluation(r.suite, r.mode, r.solved, r.total, r.ci95, step=step),
    )
    console.print(results_table(results))
    if adapter is not None:
        say(console, f"adapter: {adapter}")
    if json_file is not None:
        write_file_atomic(json_file, json.dumps(record(recipe, subject, results), indent=1) + "\n")


def refuse_unwritable(file: Path, option: str = "--json") -> None:
    """Says now, and not after minutes of play, that a file can't be written.

    Raises:
        UserError: it is a folder, or in a place that is closed.
    """
    if file.is_dir():
        raise UserError(f"{option} {file} is a folder: name a file")
    place = next(folder for folder in Path(os.path.abspath(file)).parents if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise UserError(f"{option} {file} can't be written: {place} is a file or closed to you; name another")


def results_table(results: list[Result]) -> Table:
    """What was found, a row a result."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("suite", no_wrap=True)
    table.add_column("mode")
    for name in ("solved", "rate", "95 % interval", "path length: solved/total"):
        table.add_column(name, justify="right")
    for result in results:
        low, high = result.ci95
        lengths = "  ".join(
            f"{length}:\u00a0{r['solved']}/{r['total']}"
            for length, r in result.by_path_length().items()
            if length != "None"
        )
        rate, counts = f"{result.solve_rate:.1%}", f"{result.solved}/{result.total}"
        table.add_row(result.suite, result.mode, counts, rate, f"{low:.1%} - {high:.1%}", lengths)
    return table


def _recipe(overrides: list[str], run: Path | None, model: str | None, suite: str | None) -> Recipe:
    if run is not None:
        exported_steps(run)  # says so if it is no run directory
        source = str(run / RECIPE)
    else:
        source = "laptop"
    if model is not None:
        overrides = [*overrides, f"model.path={json.dumps(model)}"]
    if suite is not None:
        overrides = [*overrides, f"evaluation.suites={json.dumps([suite])}"]
    return load_recipe(source, overrides)
