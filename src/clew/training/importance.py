"""What importance weights between trainer and engine a recipe means; no torch, so that a plan or a list can ask."""

from __future__ import annotations

from clew.recipe import Recipe

DEFAULT_TIS_CAP = 2.0


def tis_cap(recipe: Recipe) -> float | None:
    """The cap of the importance weights between trainer and engine; None where none are used.

    Engines that run the trainer's own code sample from its very distribution up to rounding; vLLM's kernels do not.
    """
    cap = recipe.algorithm.tis_cap
    if cap is None:
        return DEFAULT_TIS_CAP if recipe.rollout.engine == "vllm" else None
    return cap or None
