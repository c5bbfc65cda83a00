"""The suites of a recipe: made once, apart from each other, whoever plays them."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from clew.envs.base import Suite
from clew.envs.suites import SUITES, content_hashes, maze_suite, suite_settings
from clew.errors import UserError
from clew.recipe import EnvironmentTable, Recipe


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


def token_budget(recipe: Recipe, settings: dict[str, Any]) -> int:
    """Tokens that a trajectory may have under a suite's settings: larger mazes and longer caps need more."""
    table = recipe.environment
    own = table.size[0] * table.size[1] * table.max_turns
    rows, cols = settings["size"]
    needed = rows * cols * settings["max_turns"]
    return -(-recipe.rollout.max_tokens * max(needed, own) // own)


def longest_episode(recipe: Recipe) -> tuple[int, int]:
    """(tokens, turns) that no episode of a recipe exceeds, be it played for training or in a suite."""
    own = environment_settings(recipe.environment)
    played = [own, *(suite_settings(name, own) for name in recipe.evaluation.suites)]
    return max(token_budget(recipe, s) for s in played), max(s["max_turns"] for s in played)


class RecipeSuites:
    """The suites that a recipe's environment and sizes give.

    Attributes:
        settings: keyword arguments of the environment of the recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.settings = environment_settings(recipe.environment)
        self._suites: dict[str, Suite] = {}

    def suite(self, name: str) -> Suite:
        """A suite by name, made once; no maze is in two suites."""
        if name not in self._suites:
            size = self.recipe.evaluation.confirm_size if name == "unseen" else self.recipe.evaluation.size
            try:
                earlier = (self._possible(other) for other in takewhile(lambda other: other != name, SUITES))
                self._suites[name] = maze_suite(name, self.settings, size, apart_from=filter(None, earlier))
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
