"""The suites of a recipe: made once, apart from each other, whoever plays them."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from clew.envs.base import Suite
from clew.envs.maze_env import ENV_ID
from clew.envs.registry import is_known
from clew.envs.suites import content_hashes, is_env_id, make_suite, suite_names, suite_settings
from clew.errors import UserError
from clew.recipe import Recipe


def environment_settings(recipe: Recipe, env_id: str | None = None) -> dict[str, Any]:
    """Keyword arguments of the environment of a recipe, or of another one played under it."""
    table = recipe.environment
    env_id = env_id or table.id
    if env_id.startswith("visgym:"):
        return {"max_turns": table.max_turns}
    if env_id.startswith("gym:"):
        return {"max_turns": table.max_turns, **table.gymnasium.model_dump()}
    return {
        "size": table.size,
        "min_path": table.min_path,
        "max_path": table.max_path,
        "max_turns": table.max_turns,
        "goal": table.goal,
        "braid": table.braid,
        "palette": table.palette,
    }


def suite_world(recipe: Recipe, name: str) -> tuple[str, dict[str, Any]]:
    """Environment id and settings of a suite by name.

    Raises:
        UserError: there is no such suite.
    """
    env_id = recipe.environment.id
    if is_env_id(name) and is_known(name):
        return name, environment_settings(recipe, name)
    if name not in suite_names(env_id):
        raise UserError(
            f"evaluation.suites: {name!r} is unknown; there are {', '.join(suite_names(env_id))}, "
            "and environments by their ids (visgym:maze_2d/easy, gym:FrozenLake-v1)"
        )
    settings = environment_settings(recipe)
    return env_id, suite_settings(name, settings) if env_id == ENV_ID else settings


def token_budget(recipe: Recipe, settings: dict[str, Any]) -> int:
    """Tokens that a trajectory may have under a suite's settings: larger mazes and longer caps need more."""
    own, needed = _extent(environment_settings(recipe)), _extent(settings)
    return -(-recipe.rollout.max_tokens * max(needed, own) // own)


def _extent(settings: dict[str, Any]) -> int:
    rows, cols = settings.get("size", (1, 1))
    return int(rows * cols * settings["max_turns"])


def longest_episode(recipe: Recipe) -> tuple[int, int]:
    """(tokens, turns) that no episode of a recipe exceeds, be it played for training or in a suite."""
    played = [environment_settings(recipe), *(suite_world(recipe, name)[1] for name in recipe.evaluation.suites)]
    return max(token_budget(recipe, s) for s in played), max(s["max_turns"] for s in played)


class RecipeSuites:
    """The suites that a recipe's environment and sizes give.

    Attributes:
        settings: keyword arguments of the environment of the recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.settings = environment_settings(recipe)
        self.names = suite_names(recipe.environment.id)
        self._suites: dict[str, Suite] = {}

    def suite(self, name: str) -> Suite:
        """A suite by name, made once; no task is in two suites of the recipe's own environment."""
        if name not in self._suites:
            env_id, settings = suite_world(self.recipe, name)
            size = self.recipe.evaluation.confirm_size if name == "unseen" else self.recipe.evaluation.size
            earlier = [] if is_env_id(name) else takewhile(lambda other: other != name, self.names)
            try:
                apart_from = filter(None, [self._possible(other) for other in earlier])
                self._suites[name] = make_suite(name, env_id, settings, size, apart_from)
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
        names = dict.fromkeys((*self.names, *self.recipe.evaluation.suites))
        suites = (self.suite(name) if name in needed else self._possible(name) for name in names)
        return content_hashes(filter(None, suites))
