"""From an environment id and settings to an environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clew.envs.base import ImageEnv
from clew.envs.maze_env import ENV_ID, MazeEnv
from clew.errors import UserError


def _visgym(env_id: str, **settings: Any) -> ImageEnv:
    from clew.envs.visgym import make_visgym

    return make_visgym(env_id, **settings)


def _gymnasium(env_id: str, **settings: Any) -> ImageEnv:
    from clew.envs.gymnasium_env import PREFIX, GymnasiumEnv

    return GymnasiumEnv(env_id.removeprefix(PREFIX), **settings)


ENVIRONMENTS: dict[str, Callable[..., ImageEnv]] = {ENV_ID: MazeEnv}
"""What makes an environment, by its id."""
FAMILIES: dict[str, Callable[..., ImageEnv]] = {"visgym:": _visgym, "gym:": _gymnasium}
"""What makes an environment, by the beginning of its id, which it is given first."""


def is_known(env_id: str) -> bool:
    """Whether something here makes environments of this id or of its family."""
    return env_id in ENVIRONMENTS or env_id.startswith(tuple(FAMILIES))


def make_env(env_id: str, **settings: Any) -> ImageEnv:
    """Makes the environment ``env_id`` with its settings.

    Raises:
        UserError: the id is unknown, or a setting is out of range.
    """
    prefix = next((prefix for prefix in FAMILIES if env_id.startswith(prefix)), None)
    if not is_known(env_id):
        known = (*ENVIRONMENTS, *(f"{prefix}..." for prefix in FAMILIES))
        raise UserError(f"environment.id: {env_id!r} is unknown; there are {', '.join(known)}")
    try:
        return FAMILIES[prefix](env_id, **settings) if prefix else ENVIRONMENTS[env_id](**settings)
    except ValueError as error:
        raise UserError(f"[environment]: {error}") from error
