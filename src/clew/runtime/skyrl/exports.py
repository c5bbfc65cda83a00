"""What SkyRL 0.4.0 exports: an adapter, or a whole model, in ``EXPORTS/global_step_N/policy``.

Where the policy has LoRA layers, the folder holds PEFT's files (weights of the adapter only) beside the base model's
config.json, tokenizer and processor: it looks like a model and is none. SkyRL puts it there under a temporary name and
renames it, so a folder of that name is whole.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from clew.envs.suites import file_stem
from clew.errors import UserError
from clew.runtime.skyrl.checkpoints import PREFIX
from clew.runtime.skyrl.translate import Places

log = logging.getLogger(__name__)
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
_EVALS = "dumped_evals"


@dataclass(frozen=True)
class Export:
    """An export.

    Attributes:
        kind: ``adapter`` (PEFT) or ``model`` (Hugging Face folder with all weights).
        folder: it.
        base: the model that an adapter belongs to, as its configuration names it; None for a model.
        step: training step, where the folder lies as SkyRL put it.
    """

    kind: Literal["adapter", "model"]
    folder: Path
    base: str | None
    step: int | None


def is_skyrl_run(run_dir: Path) -> bool:
    """Whether a run directory is one of SkyRL's."""
    return Places(run_dir).exports.is_dir()


def find_export(path: Path) -> Export | None:
    """The export in a folder: ``policy`` itself, or the ``global_step_N`` above it; None if it holds none.

    Raises:
        UserError: an adapter's configuration can't be read.
    """
    folder = path if not (path / "policy").is_dir() else path / "policy"
    match = re.fullmatch(rf"{PREFIX}(\d{{1,18}})", Path(os.path.abspath(folder)).parent.name, re.ASCII)
    step = int(match[1]) if match and folder.name == "policy" else None
    if all((folder / name).is_file() for name in ADAPTER_FILES):
        config = folder / "adapter_config.json"
        try:
            base = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{config} can't be read ({error!r}): is it a PEFT adapter?") from error
        return Export("adapter", folder, base, step)
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return Export("model", folder, None, step)
    return None


def exported(run_dir: Path) -> dict[int, Export]:
    """The exports of a SkyRL run by step, oldest first."""
    found = {}
    folder = Places(run_dir).exports
    for entry in folder.iterdir() if folder.is_dir() else ():
        export = find_export(entry / "policy") if entry.name.startswith(PREFIX) else None
        if export is not None and export.step is not None:
            found[export.step] = export
    return dict(sorted(found.items()))


def solve_rates(run_dir: Path, suite: str) -> dict[int, float]:
    """Solve rate of a suite by step; see ``solved``."""
    return {step: won / played for step, (won, played) in solved(run_dir, suite).items()}


def solved(run_dir: Path, suite: str) -> dict[int, tuple[int, int]]:
    """Solved and played tasks of a suite by step, from what SkyRL wrote of its evaluations.

    Episodes that reached the goal, and those that no crash has ended: SkyRL's own ``pass_at_1`` counts every reward.
    """
    counts = {}
    for file in Places(run_dir).exports.glob(f"{_EVALS}/{PREFIX}*_evals/aggregated_results.jsonl"):
        number = file.parent.name.removeprefix(PREFIX).removesuffix("_evals")
        try:
            figures = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:  # SkyRL was killed while it wrote: the evaluation is played again, or lost
            log.warning("%s is cut short and is left out", file)
            continue
        prefix = f"eval/all/environment/{file_stem(suite)}/"
        if number.isdecimal() and figures.get(f"{prefix}episodes"):
            counts[int(number)] = (round(figures[f"{prefix}solved"]), round(figures[f"{prefix}episodes"]))
    return counts


def adapter_folder(export: Export) -> Path:
    """The folder of an export that is to be an adapter.

    Raises:
        UserError: it is a whole model.
    """
    if export.kind != "adapter":
        raise UserError(f"{export.folder} is a whole model and no adapter: give it as --model")
    return export.folder


def all_but_adapter(folder: Any, names: list[str]) -> set[str]:
    """What is left out of a copy of an export: an adapter to serve is no half of a model folder (for ``copytree``)."""
    return set(names) - set(ADAPTER_FILES)


def adapter_facts(folder: Path) -> dict[str, Any]:
    """Name, hash and base model of an exported adapter, for its manifest; what SkyRL wrote has none.

    Raises:
        UserError: it can't be read, or holds numbers that are not finite.
    """
    from clew.policy.adapter import read_adapter, tensors_hash

    adapter = read_adapter(folder)
    if broken := next((name for name, tensor in adapter.tensors.items() if not tensor.isfinite().all()), None):
        raise UserError(f"{folder}: {broken} holds numbers that are not finite; export another --step")
    if not any(tensor.any() for name, tensor in adapter.tensors.items() if ".lora_B." in name):
        log.warning("%s changes nothing: its B matrices are all zero", folder)
    export = find_export(folder)
    step, digest = (export.step or 0) if export else 0, tensors_hash(adapter.tensors)
    return {
        "adapter": f"step-{step:06d}-{digest[:8]}",
        "sha256": digest,
        "base_model": adapter.config.get("base_model_name_or_path"),
    }
