"""Exports: an adapter folder that works elsewhere, with a card that says where it comes from."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from clew.checkpoint import DamagedCheckpoint, verify, write_directory
from clew.envs.base import ImageEnv
from clew.envs.registry import make_env
from clew.errors import UserError
from clew.policy.adapter import Adapter, read_adapter, tensors_hash, write_adapter
from clew.policy.model import VisionLanguageModel, collate, hidden_states, load_model
from clew.policy.vision import encode

log = logging.getLogger(__name__)


@torch.no_grad()
def adapter_effect(vlm: VisionLanguageModel, policy: PeftModel, env: ImageEnv) -> float:
    """Largest change of a logit that the attached adapter makes on the environment's first prompt.

    An adapter whose names do not match a model is loaded by many tools without an error and does nothing; this
    number shows that it does something.
    """
    observation, _ = env.reset(0)
    patches = vlm.patcher(observation.image)
    t, h, w = patches.grid
    ids = vlm.template.opening(env.prompt, observation.text, t * h * w // vlm.merge_size**2)
    batch = collate([(ids, [False] * len(ids), [patches.grid])], vlm.template.image_token_id, vlm.merge_size)
    features = encode(vlm.model.model.visual, [patches])

    def last_logits() -> torch.Tensor:
        return vlm.model.lm_head(hidden_states(vlm.model, batch, features)[0, -1]).float()

    adapted = last_logits()
    with policy.disable_adapter():
        return float((adapted - last_logits()).abs().max())


def stored_effect(base: str, dtype: torch.dtype, folder: Path, env_id: str, settings: dict[str, Any]) -> float:
    """``adapter_effect`` of an adapter folder on its base model, which is loaded on the CPU.

    Raises:
        UserError: the model can't be loaded, or PEFT can't put the adapter on it.
    """
    vlm = load_model(base, dtype)
    try:
        policy = PeftModel.from_pretrained(vlm.model, folder, use_safetensors=True).eval()
    except (ValueError, RuntimeError, KeyError) as error:  # RuntimeError: of torch, for shapes that differ
        raise UserError(f"{folder} does not fit {base} ({str(error).splitlines()[0]})") from error
    with contextlib.closing(make_env(env_id, **settings)) as env:
        return adapter_effect(vlm, policy, env)


def export_adapter(adapter: Adapter, folder: Path, card: dict[str, Any], effect: float) -> Path:
    """Writes an adapter folder (PEFT files, card, manifest last) and proves that what was written is the adapter.

    The same adapter written again is a no-op; a folder is never overwritten with another one.

    Args:
        card: facts for the model card, deterministic (base, environment, evaluation, seeds).
        effect: what ``adapter_effect`` found; an adapter without effect is exported with a warning in its card.
    """
    if effect == 0.0:
        log.warning("adapter %s changes no logit: nothing has been learned yet", adapter.name)

    def write(staging: Path) -> None:
        write_adapter(adapter, staging)
        (staging / "README.md").write_text(model_card(adapter, card, effect))

    facts = {
        "adapter": adapter.name,
        "sha256": adapter.content_hash,
        "base_model": card["base_model"],
        "base_sha256": card["base_sha256"],
        "effect": shown_effect(effect),
    }
    if not _is_there(folder, facts):
        write_directory(folder, write, facts)
    if tensors_hash(read_adapter(folder).tensors) != adapter.content_hash:
        raise UserError(f"{folder}: the exported weights differ from the trained ones; is the disk damaged?")
    return folder


def shown_effect(effect: float) -> float:
    """An effect as cards and manifests state it: four digits."""
    return float(f"{effect:.4g}")


def _is_there(folder: Path, facts: dict[str, Any]) -> bool:
    """Whether this very adapter is exported already; an export of the same step that differs is renamed.

    That one is left by a process that died between this export and its next checkpoint, on a device that does not
    repeat its bits, or when the base model lay elsewhere. Nothing saved is lost, and a run can go on.
    """
    try:
        found = verify(folder).facts
    except DamagedCheckpoint:
        return False  # absent or partial: write_directory deals with it
    if found != facts:
        aside = next(p for n in itertools.count(1) if not (p := Path(f"{folder}.superseded-{n}")).exists())
        folder.rename(aside)
        log.warning(
            "%s held another export of this step (%s); it is kept in %s",
            folder,
            found.get("adapter"),
            aside,
        )
    return found == facts


def model_card(adapter: Adapter, card: dict[str, Any], effect: float) -> str:
    """The model card, in the form that model hubs read.

    Args:
        card: see ``export_adapter``. ``confirmed``, if it is there, holds the counts of the best step played again
            (``again``) and on tasks that never were used before (``unseen``); ``trainer`` is who trained, if not Clew.
    """
    evaluation, confirmed = card.get("evaluation"), card.get("confirmed")
    solved = (
        f"{evaluation['solved']}/{evaluation['total']} of the held-out tasks, sampled "
        f"(95 % interval {evaluation['ci95'][0]:.3f}-{evaluation['ci95'][1]:.3f})"
        if evaluation
        else "not evaluated at this step"
    )
    if confirmed:
        again, unseen = confirmed["again"], confirmed["unseen"]
        solved += (
            f" |\n| confirmed | {again['solved']}/{again['total']} of the same tasks with fresh draws, "
            f"{unseen['solved']}/{unseen['total']} of tasks never looked at before "
            f"(95 % interval {unseen['ci95'][0]:.3f}-{unseen['ci95'][1]:.3f})"
        )
    return f"""---
library_name: peft
base_model: {card["base_model"]}
tags: [lora, grpo, vision-language, clew]
---
# {adapter.name}

A LoRA adapter (rank {adapter.config["r"]}, alpha {adapter.config["lora_alpha"]}) trained by reinforcement learning
(GRPO) with {card.get("trainer", "Clew")}.

| fact | value |
|---|---|
| base model | `{card["base_model"]}` (weights SHA-256 `{card["base_sha256"]}`) |
| adapter weights SHA-256 | `{adapter.content_hash}` |
| training step | {card["step"]} |
| recipe, seed | {card["recipe"]}, {card["seed"]} |
| environment | `{json.dumps(card["environment"])}` |
| evaluation | {solved} |
| effect check | largest change of a logit on the first prompt: {effect:.4g}{" (NO EFFECT)" if effect == 0 else ""} |

Load it with `peft.PeftModel.from_pretrained(base, this_folder)`, or serve it with vLLM (`--enable-lora
--max-lora-rank {adapter.config["r"]}`). It adapts the language model only.
"""
