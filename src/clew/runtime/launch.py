"""The local runtime: a whole run in this process."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from clew.checkpoint import CheckpointStore, RunLock, clean_staging
from clew.errors import Interrupted, UserError
from clew.recipe import Recipe
from clew.runtime.interrupt import StopRequest
from clew.runtime.run_directory import (
    SUMMARY,
    adopt,
    check_run_dir,
    finished_summary,
    has_results,
    refuse_changed_recipe,
    set_aside,
)

log = logging.getLogger(__name__)
REPORT = "report.html"


def run_local(recipe: Recipe, run_dir: Path, fresh: bool, console: Console) -> dict[str, Any]:
    """Starts, continues or shows a run, and returns its summary.

    An unfinished run goes on from its newest whole checkpoint; a finished one only prints its summary, or
    goes on if ``training.steps`` is larger.

    Args:
        fresh: start again; what was there is renamed, not deleted.

    Raises:
        UserError: bad input; nothing that was saved is lost.
        Interrupted: Ctrl-C; the state is saved.
        KeyboardInterrupt: a second Ctrl-C, or one while there was nothing to save.
    """
    check_supported(recipe)
    check_run_dir(run_dir)
    if not fresh:
        refuse_changed_recipe(recipe, run_dir)
        if (summary := finished_summary(recipe, run_dir)) is not None:
            _show_finished(summary, run_dir, console)
            return summary
    # All that may be wrong with the input is found before a directory is made or moved.
    prepare_process(recipe)
    check_parts(recipe)
    if fresh and (aside := set_aside(run_dir)) is not None:
        _say(console, f"the run that was here is kept in {aside}")
    with RunLock(run_dir):
        clean_staging(run_dir)
        going_on = has_results(run_dir)
        adopt(recipe, run_dir)
        return _train(recipe, run_dir, going_on, console)


def check_supported(recipe: Recipe) -> None:
    """Refuses what a recipe may say and this version does not do.

    Raises:
        UserError: names the key.
    """
    if recipe.runtime.kind != "local":
        raise UserError(
            f'runtime.kind = "{recipe.runtime.kind}" is not in this version yet: use runtime.kind = "local"'
        )
    if recipe.rollout.engine != "transformers":
        raise UserError(
            f'rollout.engine = "{recipe.rollout.engine}" is not in this version yet: '
            'use rollout.engine = "transformers"'
        )
    if recipe.model.lora.vision:
        raise UserError(
            "model.lora.vision = true is not in this version yet (its engine adapts the language model only): "
            "use model.lora.vision = false"
        )


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare_process(recipe: Recipe) -> None:
    """Sets the threads of torch, and quiets what libraries say about themselves."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(recipe.runtime.threads or cores())
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of PEFT's calls into it


def check_parts(recipe: Recipe, with_model: bool = True) -> None:
    """Finds bad names in the recipe that only the parts themselves know.

    Args:
        with_model: the model is used too, and not only a device to put one on.

    Raises:
        UserError: names the key.
    """
    from clew.envs.registry import make_env
    from clew.envs.suites import suite_settings
    from clew.evaluation.suites import environment_settings
    from clew.policy.paths import resolve_device, resolve_model_path

    if with_model:
        resolve_model_path(recipe.model.path)
    resolve_device(recipe)
    settings = environment_settings(recipe.environment)
    make_env(recipe.environment.id, **settings).close()
    for name in recipe.evaluation.suites:
        suite_settings(name, settings)


def _train(recipe: Recipe, run_dir: Path, going_on: bool, console: Console) -> dict[str, Any]:
    from clew.evaluation.evaluate import Result
    from clew.report.progress import Progress
    from clew.report.tracking import Tracker
    from clew.training.grpo import train

    total = recipe.training.steps
    latest = CheckpointStore(run_dir / "checkpoints", recipe.checkpoint.keep).latest()
    first = latest[0] if latest else 0
    # What the trackers hold of steps that are done again is purged, step 0 too where nothing was saved.
    resumed_after = (first if latest else -1) if going_on else None
    tracker = Tracker.for_run(run_dir, resumed_after) if recipe.tracking.tensorboard else Tracker([])
    heldout = recipe.evaluation.suites[0]
    progress = Progress(total, console, first_step=first, heldout=heldout)
    stop = StopRequest()
    stop.all_saved = first >= total

    def on_result(result: Result) -> None:
        if result.step is None:  # a walker without a model; the other suites' are in the report
            if result.suite == heldout:
                low, high = result.ci95
                counts = f"{result.solved}/{result.total}, 95% CI {low:.2f}-{high:.2f}"
                progress.note(f"reference {result.suite}/{result.mode} {result.solve_rate:.4f} ({counts})")
            return
        progress.evaluation(result.suite, result.mode, result.solved, result.total, result.ci95, step=result.step)
        if result.step == 0:  # later ones are among the metrics of their step
            name = f"eval/{result.suite}/{result.mode}/solve_rate"
            first_one = (
                {"eval/all/pass_at_1": result.solve_rate} if name == f"eval/{heldout}/sampled/solve_rate" else {}
            )
            tracker.log({"step": 0, name: result.solve_rate, **first_one})

    def on_step(metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        progress.step(metrics, timing)
        tracker.log(metrics, timing)
        if metrics["step"] == total:
            stop.all_saved = True
            if stop.asked:
                raise Interrupted(total)

    groups = f"{recipe.training.prompts_per_step} x {recipe.algorithm.group_size} trajectories"
    begun = f", going on after step {first}" if going_on else ""
    _say(console, f"{recipe.name}: {total} steps of {groups} in {run_dir}{begun}")
    try:
        with stop, tracker, progress:
            summary = train(
                recipe,
                run_dir,
                on_result=on_result,
                on_step=on_step,
                on_note=progress.note,
                should_stop=lambda: stop.asked,
            )
    except Exception:  # an orderly stop or a fault, not a second Ctrl-C: the report shows how far it came
        _write_report_anyway(run_dir)
        raise
    from clew.report.html import write_report

    write_report(run_dir)
    progress.finish(summary)
    _say_where(console, run_dir)
    return summary


def _write_report_anyway(run_dir: Path) -> None:
    """The report of an unfinished run; a fault in it must not hide why the run ended."""
    from clew.report.html import write_report

    try:
        write_report(run_dir)
    except Exception:
        log.warning("%s could not be written", run_dir / REPORT, exc_info=True)


def _show_finished(summary: Mapping[str, Any], run_dir: Path, console: Console) -> None:
    from clew.report.html import write_report
    from clew.report.progress import summary_table

    report = run_dir / REPORT
    if not report.is_file() or report.stat().st_mtime < (run_dir / SUMMARY).stat().st_mtime:
        write_report(run_dir)  # the run was killed after its summary and before its report
    _say(console, f"this run is finished (--fresh starts again, a larger training.steps goes on): {run_dir}")
    console.print(summary_table(summary))
    _say_where(console, run_dir)


def _say_where(console: Console, run_dir: Path) -> None:
    _say(console, f"report: {run_dir / REPORT}")
    _say(console, f"adapters, ready to serve: {run_dir / 'adapters'}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
