"""What a cluster runs for a recipe, and what of the recipe only this machine could make sense of."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from clew.cloud.secrets import holds_secret, is_secret_key
from clew.errors import UserError
from clew.recipe import WARM_START, Recipe
from clew.runtime.prepare import hub_id
from clew.runtime.run_directory import default_run_dir


def entrypoint(recipe_file: str, run_dir: str, *, prepare: bool, clew: Sequence[str] = ("clew",)) -> str:
    """The shell command that starts a run or goes on with it: always the same, for every attempt.

    Args:
        recipe_file: the recipe's TOML file, as the cluster sees it.
        run_dir: the run directory, as the cluster sees it.
        prepare: whether what the run's first start needs is made ready before it.
        clew: how Clew is called there.
    """
    steps = [[*clew, "prepare", recipe_file]] if prepare else []
    return " && ".join(map(shlex.join, [*steps, [*clew, "train", recipe_file, "--run", run_dir]]))


def cluster_run_dir(recipe: Recipe, chosen: str | None) -> str:
    """Where the run lies on the cluster: ``--run``, or below ``runtime.shared_dir``.

    Raises:
        UserError: it would lie in the job's own working directory, which is gone after the job.
    """
    run_dir = chosen if chosen is not None else str(default_run_dir(recipe))
    if not run_dir.startswith("/") or "\0" in run_dir:
        named = (
            f"--run {run_dir}" if chosen is not None else "runtime.shared_dir is left out and --run is not given: it"
        )
        raise UserError(
            f"{named} would lie in the job's temporary folder and be lost with it: give the absolute path of a folder "
            "that all machines of the cluster see, e.g. runtime.shared_dir=/shared"
        )
    return str(PurePosixPath(run_dir))


def refuse_own_folder(recipe: Recipe) -> None:
    """Refuses a model that lies on this machine, where a cluster does not see it.

    Raises:
        UserError: ``model.path`` is neither a hub's, nor shipped with Clew, nor an absolute path.
    """
    path = recipe.model.path
    if path == WARM_START or path.startswith("/") or hub_id(recipe) is not None:
        return
    place = f"below {recipe.runtime.shared_dir}" if recipe.runtime.shared_dir else "to a folder that the cluster sees"
    raise UserError(
        f"model.path = {json.dumps(path)} is a folder of this machine, which pods don't see: copy it {place} "
        "and name it there by its absolute path, or name a hub's"
    )


def refuse_secrets(recipe: Recipe) -> None:
    """Refuses a recipe that holds what looks like a secret: RUN/recipe.toml and the dashboard would show it.

    Raises:
        UserError: names the key, not the value.
    """
    open_table = "environment.gymnasium.kwargs."
    for key, value in _texts("", recipe.model_dump(exclude_none=True)):
        if holds_secret(value) or (key.startswith(open_table) and is_secret_key(key.rpartition(".")[2])):
            raise UserError(
                f"{key} looks like a secret, and everybody who sees the run would see it: take it out, and give it to "
                "the machines as an environment variable of their own (on Kubernetes, from a Secret)"
            )


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(key, inner)
    elif isinstance(value, str):
        yield key, value
