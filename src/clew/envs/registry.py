"""From an environment id and settings to an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clew.envs.base import ImageEnv
from clew.envs.maze_env import ENV_ID, MazeEnv
from clew.errors import UserError

ENVIRONMENTS: dict[str, Callable[..., ImageEnv]] = {ENV_ID: MazeEnv}


def make_env(env_id: str, **settings: Any) -> ImageEnv:
    """Makes the environment ``env_id`` with its settings.

    Raises:
        UserError: the id is unknown, or a setting is out of range.
    """
    if env_id not in ENVIRONMENTS:
        raise UserError(f"environment.id: {env_id!r} is unknown; there are {', '.join(ENVIRONMENTS)}")
    try:
        return ENVIRONMENTS[env_id](**settings)
    except ValueError as error:
        raise UserError(f"[environment]: {error}") from error
