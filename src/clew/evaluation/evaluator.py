"""What a run evaluates, and when: baseline, every interval, at the end, confirmation, sight, references."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from clew.envs.base import Suite
from clew.envs.navigators import REFERENCES
from clew.envs.registry import make_env
from clew.envs.suites import SUITES, content_hashes, maze_suite
from clew.errors import UserError
from clew.evaluation.evaluate import Result, SwappedFrames, blank_frames, evaluate, reference, write_result
from clew.recipe import EnvironmentTable, Recipe
from clew.rollout.engine import Engine, Sampling
from clew.rollout.episodes import FrameFilter, Limits, Player


def environment_settings(table: EnvironmentTable) -> dict[str, Any]:
    """Keyword arguments of the environment of a recipe."""
    return {
        "size": table.size,
        "min_path": table.min_path,
        "max_path": table.max_path,
        "max_turns": table.max_turns,
        "goal": table.goal,
        "braid": table.braid,
        "palette": table.palette,
    }


class Evaluator:
    """Plays the suites of a recipe with an engine and writes what it finds to the run directory.

    Args:
        write_to: the run directory, or None to write nothing.
        report: called with every result.
    """

    def __init__(
        self,
        recipe: Recipe,
        engine: Engine,
        player: Player,
        write_to: Path | None,
        report: Callable[[Result], None],
    ) -> None:
        self.recipe, self.engine, self.player = recipe, engine, player
        self.write_to, self.report = write_to, report
        self._settings = environment_settings(recipe.environment)
        self._suites: dict[str, Suite] = {}
        self.main = recipe.evaluation.suites[0]

    def suite(self, name: str) -> Suite:
        """A suite by name, made once; no maze is in two suites."""
        if name not in self._suites:
            size = self.recipe.evaluation.confirm_size if name == "unseen" else self.recipe.evaluation.size
            try:
                earlier = (self._possible(other) for other in takewhile(lambda other: other != name, SUITES))
                self._suites[name] = maze_suite(name, self._settings, size, apart_from=filter(None, earlier))
            except ValueError as error:
                raise UserError(f"[environment]: suite {name!r} can't be made ({error})") from error
        return self._suites[name]

    def _possible(self, name: str) -> Suite | None:
        """A suite, or None where these settings can't make it (longer paths than a small maze has)."""
        try:
            return self.suite(name)
        except UserError:
            return None

    def held_out(self) -> frozenset[str]:
        """Content of every suite there is, asked for or not: none of it may be trained on."""
        needed = {*self.recipe.evaluation.suites, "heldout", "unseen"}
        suites = (self.suite(name) if name in needed else self._possible(name) for name in SUITES)
        return content_hashes(filter(None, suites))

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
            "swapped": self._play(self.main, "swapped", step, see=SwappedFrames(self.suite(self.main))),
        }

    def references(self) -> list[Result]:
        """Policies without a model on every suite of the recipe."""
        results = []
        for name in self.recipe.evaluation.suites:
            for policy in REFERENCES:
                results.append(reference(self.suite(name), policy, self.recipe.training.seed))
                self._keep(results[-1], replays=False)
        return results

    def _play(
        self, name: str, mode: str, step: int, *, see: FrameFilter | None = None, replays: bool = False
    ) -> Result:
        recipe, suite = self.recipe, self.suite(name)
        temperature = 0.0 if mode == "greedy" else recipe.rollout.temperature
        result = evaluate(
            self.engine,
            self.player,
            lambda: make_env(recipe.environment.id, **suite.env_kwargs),
            suite,
            mode,
            step,
            Sampling(temperature, recipe.rollout.max_new_tokens),
            # A suite with a longer cap needs more tokens; the deadline is the recipe's.
            Limits(self._token_budget(suite), recipe.rollout.deadline_s),
            ("eval", recipe.training.seed, step, mode),
            see,
        )
        self._keep(result, replays=replays)
        return result

    def _token_budget(self, suite: Suite) -> int:
        own = self._settings["size"][0] * self._settings["size"][1] * self._settings["max_turns"]
        rows, cols = suite.env_kwargs["size"]
        needed = rows * cols * suite.env_kwargs["max_turns"]
        return -(-self.recipe.rollout.max_tokens * max(needed, own) // own)

    def _keep(self, result: Result, *, replays: bool) -> None:
        if self.write_to is not None:
            write_result(self.write_to, result, self.player.template.tokenizer if replays else None)
        self.report(result)
