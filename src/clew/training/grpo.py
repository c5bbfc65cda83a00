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
from clew.envs.registry import make_env
from clew.envs.suites import take_distinct, training_tasks
from clew.errors import Interrupted
from clew.evaluation.evaluate import Result
from clew.evaluation.evaluator import Evaluator
from clew.evaluation.suites import environment_settings
from clew.policy.adapter import Adapter, attach_lora, current_adapter
from clew.policy.export import adapter_effect, export_adapter
from clew.policy.model import load_model
from clew.policy.paths import resolve_device, resolve_dtype, resolve_model_path
from clew.policy.vision import FeatureCache
from clew.recipe import Recipe
from clew.rollout.engine import Sampling, derive_seed
from clew.rollout.episodes import Limits, Player, play
from clew.rollout.transformers_engine import TransformersEngine
from clew.training.finish import finish
from clew.training.run_state import RunState
from clew.training.samples import episode_metrics, group_metrics, prepare, warnings_for
from clew.training.update import Updater, deterministic_dropout, no_update_metrics

log = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    run_dir: Path,
    *,
    on_result: Callable[[Result], None],
    on_step: Callable[[dict[str, Any], dict[str, Any]], None],
    on_note: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Runs or continues a recipe in a run directory and returns its summary.

    The directory must be locked by the caller and hold this recipe (see ``clew.runtime.local``).

    Raises:
        Interrupted: ``should_stop`` answered True; the state is saved.
        UserError: the recipe and the model, the disk or the environment do not go together.
    """
    session_began = time.monotonic()
    vlm = load_model(resolve_model_path(recipe.model.path), resolve_dtype(recipe), resolve_device(recipe))
    lora = recipe.model.lora
    seed = recipe.training.seed
    policy = attach_lora(vlm, lora.rank, lora.alpha, lora.dropout, lora.target, lora.vision, seed)
    features = FeatureCache(vlm.model.model.visual, vlm.patcher)
    engine = TransformersEngine(vlm, features)
    player = Player(vlm.template, vlm.patcher)
    updater = Updater(
        vlm,
        policy,
        features,
        recipe.algorithm,
        recipe.training,
        recipe.rollout.temperature,
        recipe.rollout.max_tokens,
    )
    evaluator = Evaluator(recipe, engine, player, run_dir, on_result)
    settings = environment_settings(recipe.environment)
    sampling = Sampling(recipe.rollout.temperature, recipe.rollout.max_new_tokens)
    limits = Limits(recipe.rollout.max_tokens, recipe.rollout.deadline_s)
    held_out = evaluator.suites.held_out()
    new_env = partial(make_env, recipe.environment.id, **settings)

    state = RunState(recipe, run_dir, policy, updater.optimizer)
    state.restore()
    version = current_adapter(policy, state.step)
    engine.load_adapter(version)
    tasks = training_tasks(new_env(), held_out, seed, state.position)

    def export(step: int, version: Adapter) -> None:
        card = {
            "base_model": vlm.path,
            "base_sha256": state.base_sha256,
            "step": step,
            "recipe": recipe.name,
            "seed": seed,
            "environment": {"id": recipe.environment.id, **settings},
            "evaluation": state.evaluations.get(step),
        }
        effect = adapter_effect(vlm, policy, new_env())
        export_adapter(version, run_dir / "adapters" / f"step-{step:06d}", card, effect)

    if state.step == 0:
        if recipe.evaluation.references:
            evaluator.references()
        if recipe.evaluation.before_training:
            baseline = [evaluator.regular(0), *evaluator.thorough(0)]
            state.record_evaluation(baseline[0])
            append_jsonl(run_dir / "metrics.jsonl", {"step": 0, **evaluation_metrics(baseline)})

    for step in range(state.step + 1, recipe.training.steps + 1):
        step_began = time.monotonic()

        # Play: every task by a whole group, all under one policy version.
        engine.load_adapter(version)
        drawn = take_distinct(tasks, recipe.training.prompts_per_step)
        attempts = [(task, k) for _, task in drawn for k in range(recipe.algorithm.group_size)]
        trajectories = play(
            engine,
            player,
            new_env,
            attempts,
            sampling,
            limits,
            ("train", seed, step),
        )
        played = time.monotonic()

        # Judge each trajectory against its group, and learn from the groups that differ.
        samples, used = prepare(trajectories, recipe.algorithm)
        with deterministic_dropout(derive_seed("update", seed, step)):
            if any(used):
                update = updater.update(samples, used, step)
            else:
                update = no_update_metrics(updater.learning_rate(step))
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

        # Look at the new policy, save it.
        last = step == recipe.training.steps
        state.step, state.position = step, drawn[-1][0]
        version = current_adapter(policy, step)
        improved = False
        if last or step % recipe.evaluation.interval == 0:
            engine.load_adapter(version)
            results = [evaluator.regular(step), *(evaluator.thorough(step) if last else [])]
            metrics |= evaluation_metrics(results)
            improved = state.record_evaluation(results[0])
        evaluated = time.monotonic()
        if last or improved or step % recipe.checkpoint.export_interval == 0:
            export(step, version)
        append_jsonl(run_dir / "metrics.jsonl", metrics)
        stopping = should_stop()
        if last or stopping or step % recipe.checkpoint.interval == 0:
            state.save()
        now = time.monotonic()
        timing = {
            "step": step,
            "rollout_s": played - step_began,
            "train_s": learned - played,
            "eval_s": evaluated - learned,
            "checkpoint_s": now - evaluated,
            "step_s": now - step_began,
            "tokens_per_s": metrics["rollout/tokens_total"] / (learned - step_began),
            "trajectories_per_s": len(trajectories) / (learned - step_began),
            "rss_bytes": peak_resident_bytes(),
            "session": state.session,
            "elapsed_s": now - session_began,
        }
        append_jsonl(run_dir / "timing.jsonl", timing)
        on_step(metrics, timing)
        if stopping and not last:
            raise Interrupted(step)

    return finish(recipe, run_dir, evaluator, engine, policy, state, session_began)


def evaluation_metrics(results: list[Result]) -> dict[str, float]:
    """Solve rates for metrics.jsonl; the first result is the held-out set, sampled."""
    rates = {f"eval/{r.suite}/{r.mode}/solve_rate": r.solve_rate for r in results}
    return {"eval/all/pass_at_1": results[0].solve_rate, **rates}


def peak_resident_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
