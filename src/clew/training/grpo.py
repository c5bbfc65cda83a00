"""GRPO with LoRA on episodes: the training loop, from a recipe to a finished run directory."""

from __future__ import annotations

import logging
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from clew.checkpoint import append_jsonl
from clew.checkpoint.patience import with_patience
from clew.envs.registry import make_env
from clew.envs.suites import take_distinct, training_tasks
from clew.errors import Interrupted
from clew.evaluation.evaluate import Result
from clew.evaluation.evaluator import Evaluator
from clew.evaluation.suites import environment_settings
from clew.policy.paths import resolve_model_path
from clew.recipe import Recipe
from clew.rollout.engine import Sampling
from clew.rollout.episodes import Limits
from clew.rollout.rollouts import Rollouts
from clew.training.finish import finish
from clew.training.policy import Policy
from clew.training.run_state import RunState
from clew.training.samples import episode_metrics, group_metrics, prepare, warnings_for

log = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    run_dir: Path,
    policy: Policy,
    rollouts: Rollouts,
    *,
    on_result: Callable[[Result], None],
    on_step: Callable[[dict[str, Any], dict[str, Any]], None],
    on_note: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Runs or continues a recipe in a run directory and returns its summary.

    The directory must be locked by the caller and hold this recipe (see ``clew.runtime.launch``).

    Args:
        policy: what is trained.
        rollouts: what plays with the policy's adapter.

    Raises:
        Interrupted: ``should_stop`` answered True; the state is saved.
        UserError: the recipe and the model, the disk or the environment do not go together.
    """
    session_began = time.monotonic()
    seed = recipe.training.seed
    # A shared file system may be full or away for a moment; the disk of a single machine won't mend itself.
    patience_s = recipe.runtime.storage_patience_s if recipe.runtime.kind == "ray" else 0.0
    patiently = partial(with_patience, patience_s=patience_s, note=on_note)
    evaluator = Evaluator(recipe, rollouts, run_dir, on_result, patiently)
    settings = environment_settings(recipe)
    sampling = Sampling(recipe.rollout.temperature, recipe.rollout.max_new_tokens)
    limits = Limits(recipe.rollout.max_tokens, recipe.rollout.deadline_s, recipe.rollout.concurrent_episodes)
    held_out = evaluator.suites.held_out()
    new_env = partial(make_env, recipe.environment.id, **settings)

    def note_down(name: str, line: dict[str, Any]) -> None:
        patiently(lambda: append_jsonl(run_dir / name, line))

    state = RunState(recipe, run_dir, policy)
    state.restore()
    version = policy.publish(state.step)
    rollouts.load(version)
    tasks = training_tasks(new_env(), held_out, seed, state.position)

    def export(step: int) -> None:
        card = {
            "base_model": resolve_model_path(recipe.model),
            "base_sha256": state.base_sha256,
            "step": step,
            "recipe": recipe.name,
            "seed": seed,
            "environment": {"id": recipe.environment.id, **settings},
            "evaluation": state.evaluations.get(step),
        }
        policy.export(run_dir / "adapters" / f"step-{step:06d}", card)

    if state.step == 0:
        if recipe.evaluation.references:
            evaluator.references()
        if recipe.evaluation.before_training:
            baseline = [evaluator.regular(0), *evaluator.thorough(0)]
            state.record_evaluation(baseline[0])
            note_down("metrics.jsonl", {"step": 0, **evaluation_metrics(baseline)})

    for step in range(state.step + 1, recipe.training.steps + 1):
        step_began = time.monotonic()

        # Play: every task by a whole group, all under one policy version.
        drawn = take_distinct(tasks, recipe.training.prompts_per_step)
        attempts = [(task, k) for _, task in drawn for k in range(recipe.algorithm.group_size)]
        trajectories = rollouts.play(new_env, attempts, sampling, limits, ("train", seed, step))
        played = time.monotonic()

        # Judge each trajectory against its group, and learn from the groups that differ.
        samples, used = prepare(trajectories, recipe.algorithm)
        update = policy.update(samples, used, step)
        learned = time.monotonic()

        metrics: dict[str, Any] = {
            "step": step,
            **episode_metrics(trajectories),
            **update,
            **group_metrics(samples, used),
            "policy/version": version.name,
        }
        for warning in warnings_for(metrics):
            on_note(f"warning: step {step}: {warning}")

        # Every engine samples with the new policy from here on.
        last = step == recipe.training.steps
        state.step, state.position = step, drawn[-1][0]
        version = policy.publish(step)
        rollouts.load(version)
        synced = time.monotonic()

        # Look at it, save it.
        improved = False
        if last or step % recipe.evaluation.interval == 0:
            results = [evaluator.regular(step), *(evaluator.thorough(step) if last else [])]
            metrics |= evaluation_metrics(results)
            improved = state.record_evaluation(results[0])
        evaluated = time.monotonic()
        if last or improved or step % recipe.checkpoint.export_interval == 0:
            export(step)
        note_down("metrics.jsonl", metrics)
        stopping = should_stop()
        if last or stopping or step % recipe.checkpoint.interval == 0:
            state.save()
        now = time.monotonic()
        timing = {
            "step": step,
            "rollout_s": played - step_began,
            "train_s": learned - played,
            "sync_s": synced - learned,
            "eval_s": evaluated - synced,
            "checkpoint_s": now - evaluated,
            "step_s": now - step_began,
            "tokens_per_s": metrics["rollout/tokens_total"] / (learned - step_began),
            "trajectories_per_s": len(trajectories) / (learned - step_began),
            "rss_bytes": peak_resident_bytes(),
            "session": state.session,
            "elapsed_s": now - session_began,
        }
        note_down("timing.jsonl", timing)
        on_step(metrics, timing)
        if stopping and not last:
            raise Interrupted(step)

    return finish(recipe, run_dir, evaluator, rollouts, version, state, session_began)


def evaluation_metrics(results: list[Result]) -> dict[str, float]:
    """Solve rates for metrics.jsonl; the first result is the held-out set, sampled."""
    rates = {f"eval/{r.suite}/{r.mode}/solve_rate": r.solve_rate for r in results}
    return {"eval/all/pass_at_1": results[0].solve_rate, **rates}


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
