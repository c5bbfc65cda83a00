"""``clew prepare``: what a run's first start needs, on the disk before it starts.

The model of the recipe, if it lies on a hub, and the lists of the tasks that will be played.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from clew.checkpoint import clean_staging, write_directory
from clew.console import say as print_line
from clew.envs.base import Task
from clew.errors import UserError
from clew.recipe import WARM_START, Recipe
from clew.runtime.hub_folder import HubFolder
from clew.runtime.run_directory import file_name

DEFAULT_DIR = Path("prepared")


def prepared_dir(recipe: Recipe) -> Path:
    """Where a recipe's prepared files are looked for: ``runtime.shared_dir``, or ``prepared`` beside ``runs``."""
    return Path(recipe.runtime.shared_dir or DEFAULT_DIR).expanduser()


def hub_id(recipe: Recipe) -> str | None:
    """The hub repository that ``model.path`` names; None if it names the shipped model or a folder."""
    path = recipe.model.path
    if path == WARM_START or path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists():
        return None
    return path


def prepared_model(recipe: Recipe) -> Path | None:
    """The prepared folder of a recipe's hub model; None if it is not prepared, or lies on no hub.

    Sizes are compared with the manifest; hashes are `clew prepare`'s to check.

    Raises:
        UserError: the folder was whole once and is damaged.
    """
    source = _hub_folder(recipe, prepared_dir(recipe)) if hub_id(recipe) else None
    folder = source.ready() if source else None
    return folder.resolve() if folder else None


def prepare(recipe: Recipe, to: Path | None, console: Console, arguments: Sequence[str]) -> None:
    """Makes ready what a recipe's first start needs, and says how to start.

    Args:
        to: folder to write to, instead of ``prepared_dir``.
        arguments: recipe and overrides, as they were given on the command line.

    Raises:
        UserError: the model can't be had, the recipe's tasks can't be made, or there is no room.
    """

    say = partial(print_line, console)
    root = to or prepared_dir(recipe)
    say(_write_task_lists(recipe, root))  # seconds: what is wrong with the recipe is found before the long download
    source = _hub_folder(recipe, root) if hub_id(recipe) else None
    start = ["clew", "train", *arguments]
    if source is None:
        say(_check_local(recipe))
    else:
        from clew.runtime.hub import fetch  # the hub's library takes a moment

        say(f"model: {source}, revision {source.revision}: looking at what is here")
        got = fetch(source, console, say)
        _check_config(got.folder)
        all_here = "" if got.downloaded else "; nothing to download"
        counts = f"{got.files} files, {decimal(got.size)}, all of them checked{all_here}"
        say(f"model: revision {source.revision} is kept to commit {got.commit}")
        say(f"model: ready in {got.folder} ({counts})")
        if root.resolve() != prepared_dir(recipe).resolve():  # where training does not look by itself
            start = [part for part in start if not part.startswith("model.path=")]
            start += [f"model.path={source.checkout(got.commit).resolve()}"]
    say(f"to start: {shlex.join(start)}")


def _hub_folder(recipe: Recipe, root: Path) -> HubFolder:
    model = recipe.model
    return HubFolder(model.path, (model.subfolder or "").strip("/"), model.revision or "main", root)


def _check_local(recipe: Recipe) -> str:
    from clew.policy.paths import resolve_model_path

    folder = Path(resolve_model_path(recipe.model))
    _check_config(folder)
    return f"model: {recipe.model.path} is on this machine; nothing to download ({folder})"


def _check_config(folder: Path) -> None:
    """Refuses a folder that is no model Clew trains; looks at its configuration only."""
    from transformers import AutoConfig

    try:
        kind = AutoConfig.from_pretrained(folder).model_type
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.path: {folder} can't be loaded as a Hugging Face model folder ({reason})") from error
    if kind != "qwen3_vl":
        raise UserError(f"model.path: {folder} is a {kind} model; Clew trains qwen3_vl models")


def _write_task_lists(recipe: Recipe, root: Path) -> str:
    """Writes the tasks of a recipe below ``root`` and returns a line about them."""
    from clew.envs.registry import make_env
    from clew.evaluation.suites import environment_settings
    from clew.runtime.process import configure_environments

    configure_environments(recipe)
    try:
        make_env(recipe.environment.id, **environment_settings(recipe)).close()
    except UserError as error:
        if recipe.environment.id.startswith("clew/"):  # always here: the recipe is wrong
            raise
        return f"tasks: no lists, this installation can't make the environment ({error})"
    lists, facts = _tasks(recipe)
    texts = {name: "".join(_line(task) for task in tasks) for name, tasks in lists.items()}
    content = json.dumps([facts, texts], sort_keys=True).encode()
    folder = root / "tasks" / f"{file_name(recipe)}-{hashlib.sha256(content).hexdigest()[:12]}"

    def write(staging: Path) -> None:
        for name, text in texts.items():
            (staging / f"{name}.jsonl").write_text(text, encoding="utf-8")

    clean_staging(folder.parent)
    write_directory(folder, write, facts)
    counts = ", ".join(f"{name} {len(tasks):,}" for name, tasks in lists.items())
    return f"tasks: {counts} in {folder}"


def _tasks(recipe: Recipe) -> tuple[dict[str, Sequence[Task]], dict[str, Any]]:
    """Every list of tasks by its name, and what they were made from.

    ``train`` is what the training loop draws, step by step, in its order.
    """
    from clew.envs.registry import make_env
    from clew.envs.suites import take_distinct, training_tasks
    from clew.evaluation.suites import RecipeSuites

    suites = RecipeSuites(recipe)
    names = dict.fromkeys((*recipe.evaluation.suites, "heldout", "unseen"))
    lists: dict[str, Sequence[Task]] = {name: suites.suite(name).tasks for name in names}
    settings = {name: suites.suite(name).env_kwargs for name in names}
    training = recipe.training
    stream = training_tasks(make_env(recipe.environment.id, **suites.settings), suites.held_out(), training.seed)
    steps = (take_distinct(stream, training.prompts_per_step) for _ in range(training.steps))
    lists["train"] = [task for drawn in steps for _, task in drawn]
    facts = {
        "environment": recipe.environment.id,
        "settings": {**settings, "train": suites.settings},
        "seed": training.seed,
        "prompts_per_step": training.prompts_per_step,
    }
    return lists, facts


def _line(task: Task) -> str:
    return json.dumps({"env_id": task.env_id, "seed": task.seed, "content_hash": task.content_hash}) + "\n"
