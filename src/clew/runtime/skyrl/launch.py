"""``clew train RECIPE runtime.kind=skyrl``: from the recipe to SkyRL's own training, or to the list it would get."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rich.console import Console

from clew.checkpoint import RunLock
from clew.console import say
from clew.envs.visgym.fork import VARIABLE as VISGYM
from clew.errors import RunFailed, UserError
from clew.recipe import Recipe, load_recipe
from clew.runtime.hub_folder import HubFolder
from clew.runtime.process import LOCK_FREE_S, check_parts, check_supported, configure_environments, in_job_s, located
from clew.runtime.run_directory import RECIPE, adopt, check_run_dir, refuse_changed_recipe, set_aside
from clew.runtime.skyrl.checkpoints import prepare_resume
from clew.runtime.skyrl.translate import Places, Translation, shell_words, translate
from clew.runtime.skyrl.validate import INSTALL, installed, validate

_CLEWS_OWN = ("adapters", "metrics.jsonl", "sync")  # of a run on another runtime


def dry_run(recipe: Recipe, run_dir: Path, console: Console) -> None:
    """Prints SkyRL's whole override list, one a line, ready for a shell; then, as comments, what has no counterpart.

    Writes nothing, and needs neither GPUs, nor the model, nor the environment, nor SkyRL.

    Raises:
        UserError: a value that is refused, by Clew or by SkyRL's own validation.
    """
    check_supported(recipe)
    path, unprepared = _model_path(recipe)
    translation = translate(recipe, run_dir, path)
    for word in shell_words(translation.overrides):
        say(console, word)
    for line in (*unprepared, *translation.reported):
        say(console, f"# {line}")
    if installed():
        validate(translation.overrides)
        say(console, f"# valid: SkyRL accepts these {len(translation.overrides)} options, and none is unknown to it")
    else:
        say(console, f"# not validated: {INSTALL}")


def launch_skyrl(recipe: Recipe, run_dir: Path, fresh: bool, console: Console) -> dict[str, Any]:
    """Starts or continues a SkyRL run; SkyRL's own console output follows.

    Args:
        fresh: start again; what was there is renamed, not deleted.

    Returns:
        ``steps`` trained in all and the folder of the ``exports``.

    Raises:
        UserError: bad input, no SkyRL or too few CUDA devices; nothing that was saved is lost.
        RunFailed: the training failed; SkyRL's output says of what.
    """
    check_supported(recipe)
    check_run_dir(run_dir)
    places, steps = Places(Path(os.path.abspath(run_dir))), recipe.training.steps
    if not fresh:
        refuse_changed_recipe(recipe, run_dir)
        if found := next((name for name in _CLEWS_OWN if (run_dir / name).exists()), None):
            raise UserError(
                f"{run_dir / found} is of a run on another runtime, which SkyRL can't continue: choose another --run, "
                "or start again with --fresh"
            )
    if recipe.runtime.address is not None:
        os.environ["RAY_ADDRESS"] = recipe.runtime.address  # where SkyRL lets Ray look
    configure_environments(recipe)
    if recipe.runtime.visgym_path is not None:  # what SkyRL's processes are given
        os.environ[VISGYM] = os.path.abspath(os.path.expanduser(recipe.runtime.visgym_path))
    _check_devices(recipe)
    check_parts(recipe)
    translation = translate(recipe, run_dir, _loadable(located(recipe)))
    config = validate(translation.overrides)
    if fresh and (aside := set_aside(run_dir)) is not None:
        say(console, f"the run that was here is kept in {aside}")
    with RunLock(run_dir, in_job_s(LOCK_FREE_S)):
        refuse_changed_recipe(recipe, run_dir)
        ranks = recipe.runtime.nodes * recipe.runtime.workers_per_node
        resume = prepare_resume(places.checkpoints, ranks, places.exports)
        for note in resume.notes:
            say(console, f"note: {note}")
        if resume.step:
            _refuse_other_steps(recipe, run_dir)
        adopt(recipe, run_dir)
        if resume.step >= steps:
            say(console, f"this run is finished (--fresh starts again, another --run starts another): {run_dir}")
        else:
            _train(recipe, places, translation, config, resume.step, console)
    say(console, f"exports, for clew eval and clew export: {places.exports}")
    return {"steps": steps, "exports": str(places.exports)}


def _refuse_other_steps(recipe: Recipe, run_dir: Path) -> None:
    """Other ``training.steps`` are as many other rows, shuffled anew, under a data position that counts the old ones.

    Raises:
        UserError: the run that goes on was begun with other ones.
    """
    steps, begun_with = recipe.training.steps, load_recipe(str(run_dir / RECIPE)).training.steps
    if steps != begun_with:
        raise UserError(
            f"training.steps: {begun_with} -> {steps}: SkyRL would shuffle the rows anew, so that what {run_dir} goes "
            f"on with repeats tasks and leaves others out; set training.steps={begun_with}, choose another --run, or "
            "start again with --fresh"
        )


def _train(recipe: Recipe, places: Places, translation: Translation, config: Any, done: int, console: Console) -> None:
    from ray.exceptions import RayError

    from clew.runtime.ray_errors import cause_of, describe
    from clew.runtime.skyrl.entrypoint import run
    from clew.runtime.skyrl.tasks import write_tasks

    for line in translation.reported:
        say(console, f"note: {line}")
    write_tasks(recipe, places.tasks)
    for folder in (places.checkpoints, places.exports, places.lora_sync, places.logs):
        folder.mkdir(exist_ok=True)
    begun = f", going on after step {done}" if done else ""
    say(console, f"{recipe.name}: {recipe.training.steps} steps with SkyRL in {places.run_dir}{begun}")
    try:
        run(config, recipe.runtime.env_processes)
    except RayError as error:
        raise RunFailed(f"SkyRL's training: {describe(cause_of(error))} (logs: {places.logs})") from error


def _model_path(recipe: Recipe) -> tuple[str, list[str]]:
    """What SkyRL loads; for a hub model that is not prepared yet, where it will lie, and a line that says so."""
    from clew.runtime.prepare import hub_id, prepared_dir, prepared_model

    model = recipe.model
    if hub_id(recipe) is None or prepared_model(recipe) is not None:
        return _loadable(located(recipe)), []
    revision = model.revision or "main"
    source = HubFolder(model.path, (model.subfolder or "").strip("/"), revision, prepared_dir(recipe).absolute())
    return str(source.folder(source.commit() or "COMMIT")), [
        f"model.path: {source} is not prepared yet: run `clew prepare {recipe.name}`, which puts it there"
    ]


def _loadable(recipe: Recipe) -> str:
    from clew.policy.paths import resolve_model_path

    return resolve_model_path(recipe.model)


def _check_devices(recipe: Recipe) -> None:
    """Refuses a run without SkyRL, or with too few CUDA devices: in the cluster, or without one on this machine."""
    import torch

    runtime = recipe.runtime
    needed = runtime.nodes * runtime.workers_per_node + (0 if runtime.colocate else runtime.engines)
    address = os.environ.get("RAY_ADDRESS")
    there = torch.cuda.device_count()
    if address is None and there < needed:
        raise UserError(_too_few(needed, there, "this machine (runtime.address or RAY_ADDRESS names a cluster)"))
    if not installed():
        raise UserError(f'runtime.kind = "skyrl": {INSTALL}')
    if address is None:
        return
    import ray

    try:
        ray.init(log_to_driver=False)
    except ConnectionError as error:
        raise UserError(f"runtime.address: no Ray cluster answers at {address} ({error})") from error
    there = int(ray.cluster_resources().get("GPU", 0))
    ray.shutdown()
    if there < needed:
        raise UserError(_too_few(needed, there, f"the Ray cluster at {address}"))


def _too_few(needed: int, there: int, where: str) -> str:
    return (
        f'runtime.kind = "skyrl" needs {needed} CUDA device{"s" * (needed > 1)}, and there are {there} on {where}: '
        "run it on GPUs, look at its options with --dry-run, or use another runtime.kind"
    )
