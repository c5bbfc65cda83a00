"""Before anything runs: what this version does, what the recipe's parts say of their names, threads."""

from __future__ import annotations

import os
import warnings
from importlib.util import find_spec

from clew.errors import UserError
from clew.recipe import Recipe

MACHINES_BACK_S, LOCK_FREE_S = 1800.0, 600.0
"""Seconds for which a job waits for machines that are being replaced, and for the lock of one that is lost."""


def check_supported(recipe: Recipe) -> None:
    """Refuses what a recipe may say and this version does not do.

    Raises:
        UserError: names the key.
    """
    if recipe.runtime.kind == "ray" and find_spec("ray") is None:
        raise UserError('runtime.kind: "ray" needs Ray, which is not installed: pip install "clew[ray]"')
    if recipe.runtime.kind == "local" and recipe.rollout.engine != "transformers":
        raise UserError(
            f'rollout.engine = "{recipe.rollout.engine}" needs engines of their own: set runtime.kind = "ray", '
            'or use rollout.engine = "transformers"'
        )
    if recipe.model.lora.vision:
        raise UserError(
            "model.lora.vision = true is not in this version yet (its engine adapts the language model only): "
            "use model.lora.vision = false"
        )


def located(recipe: Recipe) -> Recipe:
    """The recipe with its model where `clew prepare` put it, for whoever is to load that; unchanged if it is on no hub.

    Raises:
        UserError: the model has to be prepared first, or its folder is missing.
    """
    from clew.policy.paths import resolve_model_path
    from clew.runtime.prepare import hub_id, prepared_dir, prepared_model

    if hub_id(recipe) is None:
        resolve_model_path(recipe.model)
        return recipe
    if (folder := prepared_model(recipe)) is None:
        raise UserError(
            f"model.path: {recipe.model.path} is not in {prepared_dir(recipe)} yet: run `clew prepare {recipe.name}` "
            "with the same overrides first"
        )
    model = recipe.model.model_copy(update={"path": str(folder), "subfolder": None, "revision": None})
    return recipe.model_copy(update={"model": model})


def in_job() -> bool:
    """Whether this process is the driver of a job that was submitted to a Ray cluster.

    Then there is nobody to mend things at once, and the job before it may have been lost with its machines: what
    they held and what they offered is waited for.
    """
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def in_job_s(seconds: float) -> float:
    """Seconds to wait for what may come back: in a job these, elsewhere none."""
    return seconds if in_job() else 0.0


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def configure_environments(recipe: Recipe) -> None:
    """Says to this process where environments of other projects lie; each process that plays needs it."""
    from clew.envs.visgym import configure

    configure(recipe.runtime.visgym_path, recipe.runtime.env_processes)


def keep_to_this_machine(recipe: Recipe) -> None:
    """Has a Ray cluster of this process's own listen on this machine only. Ray reads this when it is imported.

    The variable is named for the systems where Ray does so by itself; on Linux it listens on every address, and whoever
    reaches its ports may run code.
    """
    if recipe.runtime.kind == "ray" and not (recipe.runtime.address or os.environ.get("RAY_ADDRESS")):
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def prepare_process(recipe: Recipe) -> None:
    """Sets the threads of torch, says where environments lie, and quiets what libraries say about themselves."""
    keep_to_this_machine(recipe)
    import torch
    from transformers.utils import logging as transformers_logging

    configure_environments(recipe)
    torch.set_num_threads(recipe.runtime.threads or cores())
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of PEFT's calls into it
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant


def check_parts(recipe: Recipe) -> None:
    """Finds bad names in the recipe that only the parts themselves know; the model's are found by ``located``.

    Raises:
        UserError: names the key.
    """
    from clew.policy.paths import resolve_device

    if recipe.runtime.kind == "local":  # the machines of a cluster have devices of their own
        resolve_device(recipe)
    check_worlds(recipe)


def check_worlds(recipe: Recipe) -> None:
    """Makes the environments that a recipe names, once.

    Raises:
        UserError: names the key.
    """
    from clew.envs.registry import make_env
    from clew.evaluation.suites import environment_settings, suite_world

    make_env(recipe.environment.id, **environment_settings(recipe)).close()
    for name in recipe.evaluation.suites:
        env_id, settings = suite_world(recipe, name)
        if env_id != recipe.environment.id:
            make_env(env_id, **settings).close()
