"""The ranks of adapters that vLLM makes room for; no torch, so that a plan, a list or a manifest can ask."""

from __future__ import annotations

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def lora_room(rank: int) -> int:
    """The least room that holds adapters of a rank of at most ``LORA_RANKS[-1]``."""
    return next(room for room in LORA_RANKS if room >= rank)
