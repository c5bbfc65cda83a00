"""What a run evaluates, and when: baseline, every interval, at the end, confirmation, sight, references."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from clew.envs.base import Suite
from clew.envs.navigators import REFERENCES, missing_reference
from clew.envs.registry import make_env
from clew.evaluation.evaluate import Result, SwappedFrames, blank_frames, evaluate, reference, write_result
from clew.evaluation.suites import RecipeSuites, token_budget
from clew.recipe import Recipe
from clew.rollout.engine import Sampling
from clew.rollout.episodes import FrameFilter, Limits
from clew.rollout.rollouts import Plays, Rollouts


def play_suite(
    recipe: Recipe, rollouts: Plays, suite: Suite, mode: str, step: int, see: FrameFilter | None = None
) -> Result:
    """Plays a suite once under the terms of a recipe, whoever samples: a figure means the same everywhere.

    Args:
        mode: ``greedy`` takes the likeliest tokens; any other draws at the recipe's temperature.
        step: the training step evaluated; the draws derive from it, and from the mode.
    """
    return evaluate(
        rollouts,
        partial(make_env, suite.env_id, **suite.env_kwargs),
        suite,
        mode,
        step,
        suite_sampling(recipe, mode),
        suite_limits(recipe, suite),
        ("eval", recipe.training.seed, step, mode),
        see,
    )


def suite_sampling(recipe: Recipe, mode: str) -> Sampling:
    """How the answers of an evaluation are drawn."""
    return Sampling(0.0 if mode == "greedy" else recipe.rollout.temperature, recipe.rollout.max_new_tokens)


def suite_limits(recipe: Recipe, suite: Suite) -> Limits:
    """Token and time budgets of a suite's episodes."""
    budget = token_budget(recipe, suite.env_kwargs)
    return Limits(budget, recipe.rollout.deadline_s, recipe.rollout.concurrent_episodes)


class Evaluator:
    """Plays the suites of a recipe and writes what it finds to the run directory.

    Args:
        write_to: the run directory, or None to write nothing.
        report: called with every result.
        patiently: calls what writes, again if storage refuses for a moment (see ``with_patience``).
    """

    def __init__(
        self,
        recipe: Recipe,
        rollouts: Rollouts,
        write_to: Path | None,
        report: Callable[[Result], None],
        patiently: Callable[[Callable[[], None]], None] = lambda write: write(),
    ) -> None:
        self.recipe, self.rollouts = recipe, rollouts
        self.write_to, self.report, self.patiently = write_to, report, patiently
        self.suites = RecipeSuites(recipe)
        self.main = recipe.evaluation.suites[0]

    def regular(self, step: int) -> Result:
        """The held-out set, sampled at the training temperature."""
        return self._play(self.main, "sampled", step, replays=True)

    def thorough(self, step: int) -> list[Result]:
        """Greedy on the held-out set, and every other suite of the recipe, sampled."""
        others = [self._play(name, "sampled", step) for name in self.recipe.evaluation.suites[1:]]
        return [self._play(self.main, "greedy", step), *others]

    def confirm(self, step: int) -> tuple[Result, Result]:
        """Fresh draws on the held-out set, and mazes that nothing was chosen by: the honest figures of the best."""
        return (
            self._play(self.main, "sampled-confirm", step),
            self._play("unseen", "sampled-confirm", step),
        )

    def sight(self, step: int) -> dict[str, Result]:
        """The held-out set with blanked frames and with the frames of another maze."""
        return {
            "blank": self._play(self.main, "blank", step, see=blank_frames),
            "swapped": self._play(self.main, "swapped", step, see=SwappedFrames(self.suites.suite(self.main))),
        }

    def references(self) -> list[Result]:
        """Policies without a model on every suite of the recipe, those that its environment allows."""
        results = []
        for name in self.recipe.evaluation.suites:
            suite = self.suites.suite(name)
            with contextlib.closing(make_env(suite.env_id, **suite.env_kwargs)) as env:
                env.reset(suite.tasks[0].seed)
                possible = [policy for policy in REFERENCES if missing_reference(env, policy) is None]
            for policy in possible:
                results.append(reference(suite, policy, self.recipe.training.seed))
                self._keep(results[-1], replays=False)
        return results

    def _play(
        self, name: str, mode: str, step: int, *, see: FrameFilter | None = None, replays: bool = False
    ) -> Result:
        result = play_suite(self.recipe, self.rollouts, self.suites.suite(name), mode, step, see)
        self._keep(result, replays=replays)
        return result

    def _keep(self, result: Result, *, replays: bool) -> None:
        if (place := self.write_to) is not None:
            tokenizer = self.rollouts.player.template.tokenizer if replays else None
            self.patiently(lambda: write_result(place, result, tokenizer))
        self.report(result)
