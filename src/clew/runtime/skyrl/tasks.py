"""A recipe's tasks as data sets that SkyRL reads: one row is one task, so the samples of a group play one maze.

Every row has these columns (SkyRL hands the environment all but the first two, as its ``extras``):

prompt        [{"role": "user", "content": instructions}]; SkyRL measures its length, ``ClewSkyRLEnv`` writes the
              first message anew, with the image
env_class     ``ENV_CLASS``
env_id        Clew's id of the environment
settings      its keyword arguments, the turn cap included, as JSON. They travel with the row because SkyRL's own
              configuration of environments has no place for those it does not know
seed          of the task
content_hash  of the task
suite         ``train``, or the name of the evaluation suite
data_source   the same as it stands in the names of metrics and files: SkyRL reports each data source apart

What the configuration has to respect: ``generator.max_turns`` is at least every row's cap
(``longest_episode(recipe)[1]``; a smaller one is refused by the environment), ``trainer.epochs`` is 1 (there are as
many rows as the run's steps play), and ``trainer.max_prompt_length`` exceeds the instructions (SkyRL drops rows that
are longer).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from clew.checkpoint import write_file_atomic
from clew.envs.base import Task
from clew.envs.registry import make_env
from clew.envs.suites import file_stem, training_tasks
from clew.errors import UserError
from clew.evaluation.suites import RecipeSuites
from clew.recipe import Recipe

ENV_CLASS = "clew"
"""Name under which Clew's environments are registered with SkyRL."""

_REPEATS_IN_A_ROW = 10_000  # then there are (nearly) no more mazes to find


class TaskFiles(NamedTuple):
    """Parquet files, as ``data.train_data`` and ``data.val_data`` take them."""

    train: Path
    heldout: Path


def write_tasks(recipe: Recipe, folder: Path) -> TaskFiles:
    """Writes a recipe's training tasks and those of all its evaluation suites below ``folder``.

    The same recipe gives the same rows in the same order, so a run that continues finds what it began with. No content
    is in two rows of the training set, and none is in both sets.

    Raises:
        UserError: the tasks can't be made, there are too few of them, or the library ``datasets`` is missing.
    """
    files = TaskFiles(folder / "train.parquet", folder / "heldout.parquet")
    for path, rows in zip(files, (training_rows(recipe), heldout_rows(recipe)), strict=True):
        _write_parquet(rows, path)
    return files


def training_rows(recipe: Recipe) -> list[dict[str, Any]]:
    """Rows of ``training.steps`` x ``training.prompts_per_step`` tasks, each with content of its own.

    SkyRL shuffles its rows, so only when all of them differ does no step hold one maze twice.

    Raises:
        UserError: there are too few different tasks.
    """
    suites = RecipeSuites(recipe)
    wanted = recipe.training.steps * recipe.training.prompts_per_step
    env = make_env(recipe.environment.id, **suites.settings)  # closed with the stream
    tasks: dict[str, Task] = {}
    repeats = 0
    for _, task in training_tasks(env, suites.held_out(), recipe.training.seed):
        repeats = repeats + 1 if task.content_hash in tasks else 0
        tasks.setdefault(task.content_hash, task)
        if len(tasks) == wanted:
            break
        if repeats == _REPEATS_IN_A_ROW:
            raise UserError(
                f"training.steps: only {len(tasks):,} different tasks were found, and SkyRL needs "
                f"{wanted:,} (steps x prompts_per_step); ask for fewer, or make environment.size larger"
            )
    return [_row(task, "train", env.prompt, suites.settings) for task in tasks.values()]


def heldout_rows(recipe: Recipe) -> list[dict[str, Any]]:
    """Rows of every suite in ``evaluation.suites``, in its order.

    Raises:
        UserError: a suite can't be made.
    """
    suites = RecipeSuites(recipe)
    rows = []
    for suite in map(suites.suite, recipe.evaluation.suites):
        with contextlib.closing(make_env(suite.env_id, **suite.env_kwargs)) as env:
            rows += [_row(task, suite.name, env.prompt, suite.env_kwargs) for task in suite.tasks]
    return rows


def _row(task: Task, suite: str, prompt: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "env_class": ENV_CLASS,
        "env_id": task.env_id,
        "settings": json.dumps(settings, sort_keys=True),
        "seed": task.seed,
        "content_hash": task.content_hash,
        "suite": suite,
        "data_source": file_stem(suite),
    }


def _write_parquet(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Writes rows with the library that SkyRL reads them with; the file is whole or absent."""
    from io import BytesIO

    try:
        from datasets import Dataset
    except ImportError as error:
        raise UserError(
            'runtime.kind = "skyrl" needs the library datasets, which comes with SkyRL (see docs/skyrl.md)'
        ) from error
    content = BytesIO()
    Dataset.from_list(list(rows)).to_parquet(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file_atomic(path, content.getvalue())
