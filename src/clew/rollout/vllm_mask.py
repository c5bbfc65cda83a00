"""The tokens that vLLM must never sample. Apart from the engine: this module needs vLLM, and its workers import it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from clew.rollout.vllm_options import FORBIDDEN_KEY


class ForbiddenTokens(LogitsProcessor):
    """Sets the logits of the ids in vLLM's ``additional_config`` to minus infinity, for every request.

    vLLM applies it before temperature, greedy choice and log-probabilities, as the scorer does.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._ids = torch.tensor(vllm_config.additional_config[FORBIDDEN_KEY], dtype=torch.long, device=device)

    def is_argmax_invariant(self) -> bool:
        """No: the likeliest token may be a forbidden one, so greedy requests need the mask too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Nothing depends on who is in the batch."""

    def apply(self, logits: Tensor) -> Tensor:
        """Masks logits [B, V] in place."""
        return logits.index_fill_(-1, self._ids, float("-inf"))
