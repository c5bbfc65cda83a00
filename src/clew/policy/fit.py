"""Whether an adapter belongs to a model: its layers are there, have its shapes, and are the weights it was made for."""

from __future__ import annotations

from pathlib import Path

from clew.checkpoint import DamagedCheckpoint, read_manifest
from clew.errors import UserError
from clew.policy.adapter import Adapter
from clew.policy.model import VisionLanguageModel
from clew.policy.paths import base_fingerprint


class ForeignAdapter(UserError):
    """An adapter was trained on another model.

    Attributes:
        reason: what shows it; names no path.
    """

    def __init__(self, called: str | Path, vlm: VisionLanguageModel, reason: str, own: object) -> None:
        super().__init__(f"{called} belongs to another model than {vlm.path} ({reason}): its own is {own}")
        self.reason = reason


def refuse_foreign_adapter(adapter: Adapter, called: str | Path, vlm: VisionLanguageModel) -> None:
    """Checks that every layer the adapter changes is there and has its shape. Nothing is multiplied.

    Args:
        called: what the message calls the adapter, for example ``--adapter PATH``.

    Raises:
        ForeignAdapter: names the layer and the model that the adapter was trained on.
        UserError: it is no plain LoRA on the language model.
    """
    modules = dict(vlm.model.model.language_model.named_modules())
    for factors in adapter.factors():
        weight = getattr(modules.get(factors.module), "weight", None)
        if weight is None or weight.shape != factors.shape:
            found = "no such layer" if weight is None else f"{list(weight.shape)} there"
            own = adapter.config.get("base_model_name_or_path")
            reason = f"layer {factors.module} has shape {list(factors.shape)}, {found}"
            raise ForeignAdapter(called, vlm, reason, own)


def refuse_other_weights(path: Path, called: str | Path, vlm: VisionLanguageModel, fingerprint: str = "") -> None:
    """Checks the base model of an adapter that Clew exported: another of the same shape gives no error by itself.

    Args:
        fingerprint: ``base_fingerprint`` of the model's folder, where the caller has it already.

    Raises:
        ForeignAdapter: it was trained on other weights.
    """
    try:
        facts = read_manifest(path).facts
    except DamagedCheckpoint:  # an adapter from elsewhere has none
        return
    if facts.get("base_sha256") not in (None, fingerprint or base_fingerprint(vlm.path)):
        raise ForeignAdapter(called, vlm, "its weights have another SHA-256", facts.get("base_model"))
