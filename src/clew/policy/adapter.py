"""LoRA adapters: attached through PEFT, moved between policy and engines, exported in PEFT's format."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from clew.errors import UserError
from clew.policy.model import VisionLanguageModel

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_KEY_PREFIX = "base_model.model."
_LANGUAGE_PREFIX = "model.language_model."
# PEFT options under which a layer's change is not alpha/rank * B @ A with one alpha and one rank for all.
_NOT_PLAIN = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")


@dataclass(frozen=True)
class Factors:
    """What LoRA adds to one module.

    Attributes:
        module: its name in the language model.
        scale: alpha / rank.
        a: [rank, in].
        b: [out, rank].
    """

    module: str
    scale: float
    a: Tensor
    b: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of the change: (out, in)."""
        return self.b.shape[0], self.a.shape[1]

    def delta(self) -> Tensor:
        """The change, scale * B @ A."""
        return self.scale * (self.b @ self.a)


@dataclass(frozen=True)
class Adapter:
    """One immutable version of the LoRA weights.

    Attributes:
        name: ``step-000012-<8 hex digits of the content hash>``; never reused for other weights.
        tensors: PEFT state dict (``base_model.model.<module>.lora_A.weight`` [rank, in], ``lora_B`` [out, rank]).
        config: PEFT's adapter_config.json as a dict.
    """

    name: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]

    @property
    def content_hash(self) -> str:
        """SHA-256 of the weights, names and shapes included."""
        return tensors_hash(self.tensors)

    def factors(self) -> Iterator[Factors]:
        """The matrices of each adapted module of the language model.

        Raises:
            UserError: the adapter is more than plain LoRA on the language model. What can't be merged is refused, not
                left out: an adapter of which a part is ignored is silently another policy.
        """
        unlike = [key for key in _NOT_PLAIN if self.config.get(key)]
        pairs = {key: key.replace(".lora_A.", ".lora_B.") for key in self.tensors if key.endswith(".lora_A.weight")}
        unlike += sorted(set(self.tensors) - set(pairs) - set(pairs.values()))
        unlike += [f"{key} without its other half" for key, other in pairs.items() if other not in self.tensors]
        if unlike or not pairs:
            found = ", ".join(unlike[:3]) or "no lora_A and lora_B weights"
            raise UserError(f"adapter {self.name}: this engine merges plain LoRA only; it has {found}")
        rank = self.config["r"]
        scale = self.config["lora_alpha"] / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        for key, other in pairs.items():
            module = key.removeprefix(_KEY_PREFIX).removesuffix(".lora_A.weight")
            if not module.startswith(_LANGUAGE_PREFIX):
                raise UserError(
                    f"adapter {self.name}: {module} is outside the language model; this engine can't apply it"
                )
            a, b = self.tensors[key], self.tensors[other]
            shapes_fit = a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] == rank
            if not shapes_fit or a.dtype != b.dtype or not a.dtype.is_floating_point:
                raise UserError(
                    f"adapter {self.name}: {module} has A {list(a.shape)} ({a.dtype}) and B {list(b.shape)} "
                    f"({b.dtype}); that is no LoRA of rank {rank}, as {CONFIG_FILE} says"
                )
            yield Factors(module.removeprefix(_LANGUAGE_PREFIX), scale, a, b)

    def deltas(self) -> Iterator[tuple[str, Tensor]]:
        """For each adapted module of the language model: its name there and alpha/rank * B @ A, [out, in].

        Raises:
            UserError: see ``factors``.
        """
        for factors in self.factors():
            yield factors.module, factors.delta()


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter version in a folder that whoever is to load it can read.

    Attributes:
        name: of the version; it never means other weights.
        folder: PEFT files with a manifest.
    """

    name: str
    folder: Path


def tensors_hash(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}|".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def attach_lora(
    vlm: VisionLanguageModel,
    rank: int,
    alpha: float,
    dropout: float,
    target: str | tuple[str, ...] = "all-linear",
    vision: bool = False,
    seed: int = 0,
) -> PeftModel:
    """Freezes the model and puts LoRA layers into its language model (and its vision tower, if asked).

    Args:
        target: ``"all-linear"`` for every projection of the decoder layers, or the last parts of module names.
        seed: of the A matrices (B starts at zero, so the adapted model starts as the base).

    Returns:
        The PEFT wrapper, in evaluation mode (no dropout); ``vlm.model`` now holds the LoRA layers in place.

    Raises:
        UserError: no module has such a name.
    """
    inside = r"model\.(language_model|visual)\." if vision else r"model\.language_model\."
    leaves = "|".join(map(re.escape, _linear_names(vlm.model, vision) if target == "all-linear" else target))
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=rf"{inside}.*\.({leaves})",
        bias="none",
        base_model_name_or_path=vlm.path,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            policy = get_peft_model(vlm.model, config).eval()
        except ValueError as error:
            raise UserError(
                f"model.lora.target: no linear layer of the language model is called {' or '.join(target)}; "
                f"there are {', '.join(_linear_names(vlm.model, vision))}"
            ) from error
    config.base_model_name_or_path = vlm.path  # PEFT puts what the model object was loaded from, if anything
    return policy


def _linear_names(model: Any, vision: bool) -> list[str]:
    parts = [model.model.language_model.layers, *([model.model.visual] if vision else [])]
    named = [item for part in parts for item in part.named_modules()]
    return sorted({n.rsplit(".", 1)[-1] for n, m in named if isinstance(m, torch.nn.Linear)})


def current_adapter(peft_model: PeftModel, step: int) -> Adapter:
    """A snapshot (a copy) of the LoRA weights as they are, named by step and content.

    Of a sharded model, the shards are gathered: all ranks must call it.
    """
    tensors = {k: _whole(v).cpu().clone() for k, v in get_peft_model_state_dict(peft_model).items()}
    config = json.loads(json.dumps(peft_model.peft_config["default"].to_dict(), default=_plain))
    return Adapter(f"step-{step:06d}-{tensors_hash(tensors)[:8]}", tensors, config)


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Writes adapter_model.safetensors and adapter_config.json into an existing folder."""
    save_file(
        {k: v.contiguous() for k, v in adapter.tensors.items()},
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    config = {**adapter.config, "inference_mode": True}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_adapter(folder: Path) -> Adapter:
    """Reads a PEFT adapter folder (safetensors only).

    Raises:
        UserError: a file is missing or broken.
    """
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
        config = json.loads((folder / CONFIG_FILE).read_text())
        _ = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--adapter {folder}: no readable PEFT adapter ({error})") from error
    except Exception as error:  # safetensors raises its own bare type
        raise UserError(f"--adapter {folder}: {WEIGHTS_FILE} is damaged ({error})") from error
    return Adapter(folder.name, tensors, config)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else getattr(value, "value", str(value))
