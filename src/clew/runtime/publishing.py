"""What is published of a run: one adapter with everything that is known about it, under a name that never changes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clew.checkpoint import read_manifest, write_directory
from clew.envs.suites import file_stem
from clew.errors import UserError
from clew.evaluation.suites import environment_settings
from clew.evaluation.wilson import wilson_interval
from clew.policy.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, read_adapter
from clew.policy.export import model_card, shown_effect, stored_effect
from clew.policy.paths import base_fingerprint, resolve_dtype
from clew.recipe import Recipe, load_recipe
from clew.runtime.adapters import find_adapter
from clew.runtime.process import located, prepare_process
from clew.runtime.run_directory import RECIPE
from clew.runtime.skyrl import exports as skyrl


@dataclass(frozen=True)
class Publishable:
    """An adapter ready to be published.

    Attributes:
        folder: its files: weights, configuration, card and manifest. The folder's name is the adapter's.
        base: what a server calls its base model.
    """

    folder: Path
    base: str


def make_publishable(run_dir: Path, step: str, to: Path) -> Publishable:
    """Copies an adapter of a run into a folder below ``to``, with its card, after the proof that it does something.

    The effect that its export measured is in its manifest; where nothing measured it (SkyRL's exports), the base model
    is loaded, on the CPU, and it is measured now.

    Args:
        step: a number, or ``best``; see ``find_adapter``.

    Raises:
        UserError: there is no such adapter, it has no effect or numbers that are not finite, or its base model is not
            known or not here and has to be.
    """
    number, source = find_adapter(run_dir, step)  # says so if it is no run directory
    recipe = load_recipe(str(run_dir / RECIPE))
    adapter = read_adapter(source)
    if broken := next((name for name, tensor in adapter.tensors.items() if not tensor.isfinite().all()), None):
        raise UserError(f"{source}: {broken} holds numbers that are not finite; export another --step")
    facts = _facts(run_dir, source, adapter)
    if facts["base_sha256"] is None or facts["effect"] is None:
        facts = _measured(recipe, source, facts)
    if facts["effect"] == 0.0:
        raise UserError(
            f"{source} changes no logit of its base model: it has learned nothing yet; publish a later --step"
        )
    name = published_name(recipe.name, recipe.training.seed, number, adapter.content_hash)
    card = {
        **facts,
        **_played(run_dir, recipe, number),
        "step": number,
        "recipe": recipe.name,
        "seed": recipe.training.seed,
        "environment": {"id": recipe.environment.id, **environment_settings(recipe)},
    }

    def write(staging: Path) -> None:
        for file in (WEIGHTS_FILE, CONFIG_FILE):
            shutil.copyfile(source / file, staging / file)
        (staging / "README.md").write_text(model_card(replace(adapter, name=name), card, facts["effect"]))

    version = f"step-{number:06d}-{adapter.content_hash[:8]}"
    facts = {"adapter": version, "sha256": adapter.content_hash, **facts}
    return Publishable(write_directory(to / name, write, facts), recipe.model.served_name)


def published_name(recipe: str, seed: int, step: int, sha256: str) -> str:
    """``RECIPE-sSEED-stepNNNNNN-HASH``, where HASH begins the weights' SHA-256: other weights get another."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", recipe)[:60].strip("-") or "recipe"
    return f"{stem}-s{seed}-step{step:06d}-{sha256[:12]}"


def _facts(run_dir: Path, source: Path, adapter: Adapter) -> dict[str, Any]:
    """Base model, its hash and the adapter's effect, each None where it isn't known."""
    own = {} if skyrl.is_skyrl_run(run_dir) else read_manifest(source).facts
    base = own.get("base_model") or adapter.config.get("base_model_name_or_path")
    return {"base_model": base, "base_sha256": own.get("base_sha256"), "effect": own.get("effect")}


def _measured(recipe: Recipe, source: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that need the base model."""
    base = facts["base_model"]
    if base is None or not Path(base).is_dir():
        try:
            base = located(recipe).model.path
        except UserError as error:
            raise UserError(f"{source} must be tried on its base model first, which isn't here ({error})") from error
    sha256 = base_fingerprint(base)
    if facts["base_sha256"] not in (None, sha256):
        raise UserError(f"{source} belongs to other weights than those of {base}: publish it where its base model is")
    prepare_process(recipe)
    settings = environment_settings(recipe)
    effect = stored_effect(base, resolve_dtype(recipe), source, recipe.environment.id, settings)
    return {"base_model": facts["base_model"] or base, "base_sha256": sha256, "effect": shown_effect(effect)}


def _played(run_dir: Path, recipe: Recipe, step: int) -> dict[str, Any]:
    """The evaluation of a step, and its confirmation where the run has made one."""
    heldout = recipe.evaluation.suites[0]
    if skyrl.is_skyrl_run(run_dir):
        counts = skyrl.solved(run_dir, heldout).get(step)
        evaluation = counts and {"solved": counts[0], "total": counts[1], "ci95": wilson_interval(*counts)}
        return {"evaluation": evaluation, "trainer": "SkyRL, from a recipe of Clew's"}
    folder = run_dir / "eval" / f"step-{step:06d}"
    files = {
        "evaluation": f"{file_stem(heldout)}.sampled.json",
        "again": f"{file_stem(heldout)}.sampled-confirm.json",
        "unseen": "unseen.sampled-confirm.json",
    }
    found = {key: _counts(folder / file) for key, file in files.items()}
    confirmed = found if found["again"] and found["unseen"] else None
    return {"evaluation": found["evaluation"], "confirmed": confirmed}


def _counts(path: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        return {key: read[key] for key in ("solved", "total", "ci95")}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}): restore it from a copy, or remove it") from error
