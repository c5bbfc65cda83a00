"""Evaluation outside a run: a model folder, an adapter or a reference policy on the suites of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clew.envs.navigators import REFERENCES
from clew.errors import UserError
from clew.evaluation.evaluate import Result, reference
from clew.evaluation.evaluator import Evaluator
from clew.evaluation.suites import RecipeSuites
from clew.policy.adapter import Adapter, read_adapter
from clew.policy.fit import refuse_foreign_adapter, refuse_other_weights
from clew.policy.model import VisionLanguageModel, load_model
from clew.policy.paths import resolve_device, resolve_dtype, resolve_model_path
from clew.policy.vision import FeatureCache
from clew.recipe import Recipe
from clew.rollout.rollouts import LocalRollouts

POLICIES = ("model", *REFERENCES)


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Attributes:
        policy: ``model``, or the name of a reference policy.
        adapter: a PEFT adapter folder on top of the recipe's model, or None.
        step: the training step it comes from; sampling seeds hold it, so a run's own figure comes out again.
    """

    policy: str = "model"
    adapter: Path | None = None
    step: int = 0


def evaluate_subject(recipe: Recipe, subject: Subject, on_result: Callable[[Result], None]) -> list[Result]:
    """Plays the suites of the recipe: all of them sampled, the first one greedily too.

    Raises:
        UserError: an unknown policy or suite, a missing model, an adapter of another model.
    """
    if subject.policy in REFERENCES:
        if subject.adapter is not None:
            raise UserError(f"--adapter can't be used with --policy {subject.policy}: that policy has no model")
        suites = RecipeSuites(recipe)
        results = []
        for name in recipe.evaluation.suites:
            results.append(reference(suites.suite(name), subject.policy, recipe.training.seed))
            on_result(results[-1])
        return results
    if subject.policy != "model":
        raise UserError(f"--policy {subject.policy}: there is no such policy; there are {', '.join(POLICIES)}")
    vlm = load_model(resolve_model_path(recipe.model), resolve_dtype(recipe), resolve_device(recipe))
    adapter = None
    if subject.adapter is not None:
        adapter = read_adapter(subject.adapter)
        called = f"--adapter {subject.adapter}"
        refuse_foreign_adapter(adapter, called, vlm)
        refuse_other_weights(subject.adapter, called, vlm)
    evaluator = make_evaluator(recipe, vlm, adapter, on_result)
    return [evaluator.regular(subject.step), *evaluator.thorough(subject.step)]


def make_evaluator(
    recipe: Recipe, vlm: VisionLanguageModel, adapter: Adapter | None, on_result: Callable[[Result], None]
) -> Evaluator:
    """An evaluator of a model with an adapter that writes no files."""
    rollouts = LocalRollouts.of(vlm, FeatureCache(vlm.model.model.visual, vlm.patcher))
    rollouts.load(adapter)
    return Evaluator(recipe, rollouts, None, on_result)


def record(recipe: Recipe, subject: Subject, results: list[Result]) -> dict[str, Any]:
    """What ``clew eval --json`` writes."""
    return {
        "policy": subject.policy,
        "model": recipe.model.path if subject.policy == "model" else None,
        "adapter": str(subject.adapter) if subject.adapter else None,
        "step": subject.step if subject.policy == "model" else None,
        "seed": recipe.training.seed,
        "temperature": recipe.rollout.temperature,
        "results": [result.record() for result in results],
    }
