"""A run from its recipe to its report, on whatever runtime the recipe names."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from clew.checkpoint import CheckpointStore, RunLock, clean_staging
from clew.console import say
from clew.errors import Interrupted, UserError
from clew.recipe import Recipe
from clew.runtime.interrupt import StopRequest
from clew.runtime.process import LOCK_FREE_S, check_parts, check_supported, in_job_s, located, prepare_process
from clew.runtime.run_directory import (
    SUMMARY,
    adopt,
    check_run_dir,
    finished_summary,
    has_results,
    refuse_changed_recipe,
    set_aside,
)

if TYPE_CHECKING:
    from clew.report.tracking import Sink
    from clew.rollout.rollouts import Rollouts
    from clew.training.policy import Policy

log = logging.getLogger(__name__)
REPORT = "report.html"


def launch(recipe: Recipe, run_dir: Path, fresh: bool, console: Console) -> dict[str, Any]:
    """Starts, continues or shows a run, and returns its summary.

    An unfinished run goes on from its newest whole checkpoint; a finished one only prints its summary, or
    goes on if ``training.steps`` is larger. A SkyRL run has no summary; its steps and exports are returned.

    Args:
        fresh: start again; what was there is renamed, not deleted.

    Raises:
        UserError: bad input; nothing that was saved is lost.
        Interrupted: Ctrl-C; the state is saved.
        KeyboardInterrupt: a second Ctrl-C, or one while there was nothing to save.
    """
    if recipe.runtime.kind == "skyrl":
        from clew.runtime.skyrl.launch import launch_skyrl

        return launch_skyrl(recipe, run_dir, fresh, console)
    check_supported(recipe)
    check_run_dir(run_dir)
    if not fresh:
        _refuse_skyrls(run_dir)
        refuse_changed_recipe(recipe, run_dir)
        if (summary := finished_summary(recipe, run_dir)) is not None:
            _show_finished(summary, run_dir, console)
            return summary
    # All that may be wrong with the input is found before a directory is made or moved.
    prepare_process(recipe)
    check_parts(recipe)  # first: nobody is to be sent to download a model for nothing
    ready = located(recipe)
    if fresh and (aside := set_aside(run_dir)) is not None:
        say(console, f"the run that was here is kept in {aside}")
    with RunLock(run_dir, in_job_s(LOCK_FREE_S)):
        clean_staging(run_dir)
        going_on = has_results(run_dir)
        adopt(recipe, run_dir)
        return _train(ready, run_dir, going_on, console)


def show_options(recipe: Recipe, run_dir: Path, console: Console) -> None:
    """Prints what SkyRL would be started with (``--dry-run``), and writes nothing.

    Raises:
        UserError: the recipe is for another runtime, or can't be translated.
    """
    if recipe.runtime.kind != "skyrl":
        raise UserError(
            f'--dry-run shows the options of a SkyRL run, and runtime.kind = "{recipe.runtime.kind}": add '
            "runtime.kind=skyrl, or look at a Ray run with `clew cluster plan`"
        )
    from clew.runtime.skyrl.launch import dry_run

    dry_run(recipe, run_dir, console)


def _refuse_skyrls(run_dir: Path) -> None:
    from clew.runtime.skyrl.exports import is_skyrl_run

    if is_skyrl_run(run_dir):
        raise UserError(
            f"{run_dir} holds a run of SkyRL's, which another runtime can't continue: add runtime.kind=skyrl, choose "
            "another --run, or start again with --fresh"
        )


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
    tracker = Tracker(_sinks(recipe, run_dir, resumed_after))
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
    say(console, f"{recipe.name}: {total} steps of {groups} in {run_dir}{begun}")
    try:
        with stop, tracker, progress, _workforce(recipe, run_dir, progress.note) as (policy, rollouts):
            summary = train(
                recipe,
                run_dir,
                policy,
                rollouts,
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


def _sinks(recipe: Recipe, run_dir: Path, resumed_after: int | None) -> Iterator[Sink]:
    from clew.report.tracking import TensorBoard

    if recipe.tracking.tensorboard:
        yield TensorBoard(run_dir / "tensorboard", resumed_after)
    if recipe.runtime.kind == "ray":
        from clew.runtime.ray_metrics import RayMetrics

        yield RayMetrics(run_dir)


@contextlib.contextmanager
def _workforce(recipe: Recipe, run_dir: Path, note: Callable[[str], None]) -> Iterator[tuple[Policy, Rollouts]]:
    """Who trains and who plays, for as long as the run takes."""
    if recipe.runtime.kind == "ray":
        from clew.runtime.cluster import cluster

        with cluster(recipe, run_dir, note) as workers:
            yield workers
        return
    from clew.rollout.rollouts import LocalRollouts
    from clew.training.learner import Learner

    learner = Learner(recipe)
    yield learner, LocalRollouts.of(learner.vlm, learner.features)


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
    say(console, f"this run is finished (--fresh starts again, a larger training.steps goes on): {run_dir}")
    console.print(summary_table(summary))
    _say_where(console, run_dir)


def _say_where(console: Console, run_dir: Path) -> None:
    say(console, f"report: {run_dir / REPORT}")
    say(console, f"adapters, ready to serve: {run_dir / 'adapters'}")
