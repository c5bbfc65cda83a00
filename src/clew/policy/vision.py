"""Frames to visual features: patches, the vision tower in batches, features reused by content."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision


@dataclass(frozen=True)
class Patches:
    """A frame cut into patches: float32 pixels [patches, channels * t * p * p] and its (t, h, w) grid."""

    pixels: Tensor
    grid: tuple[int, int, int]


class FramePatcher:
    """Cuts frames into patches exactly as the model folder's image processor does.

    A frame whose size needs no resizing takes a short cut (normalise, reshape) with the same result; any
    other goes through the Hugging Face processor.
    """

    def __init__(self, image_processor: Any) -> None:
        self.processor = image_processor
        self.patch: int = image_processor.patch_size
        self.merge: int = image_processor.merge_size
        self.temporal: int = image_processor.temporal_patch_size
        size = image_processor.size
        self._limits = (size["shortest_edge"], size["longest_edge"])
        self._pixel_values = self._tabulate()

    def _tabulate(self) -> Tensor:
        """What the processor makes of each of the 256 values of a channel: float32 [3, 256].

        Taken from the processor itself, so that the short cut agrees to the last bit whatever its rescaling and
        normalisation are.
        """
        side = self.patch * self.merge
        flat = [np.full((side, side, 3), value, np.uint8) for value in range(256)]
        out = self.processor(images=flat, return_tensors="pt", do_resize=False)["pixel_values"]
        return out.view(256, -1, 3, self.temporal * self.patch**2)[:, 0, :, 0].T.contiguous()

    def grid(self, frame: np.ndarray) -> tuple[int, int, int]:
        """The (t, h, w) patch grid of a frame."""
        height, width = smart_resize(*frame.shape[:2], self.patch * self.merge, *self._limits)
        return (1, height // self.patch, width // self.patch)

    def __call__(self, frame: np.ndarray) -> Patches:
        """Patches of one uint8 RGB frame [height, width, 3]."""
        _, rows, cols = grid = self.grid(frame)
        if (rows * self.patch, cols * self.patch) != frame.shape[:2]:
            return Patches(self.processor(images=[frame], return_tensors="pt")["pixel_values"], grid)
        image = torch.stack(
            [self._pixel_values[c][torch.from_numpy(frame[..., c].astype(np.int64))] for c in range(3)], -1
        )
        m, p = self.merge, self.patch
        cut = image.view(rows // m, m, p, cols // m, m, p, 3).permute(0, 3, 1, 4, 6, 2, 5)
        cut = cut.reshape(rows * cols, 3, 1, p * p).expand(-1, -1, self.temporal, -1)
        return Patches(cut.reshape(rows * cols, -1), grid)


def _batched_attention(
    self: Any, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: Any = None, **kwargs: Any
) -> Tensor:
    """Qwen3VLVisionAttention for images of one size: one attention call for all, not a loop over images."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    if len(set(lengths)) != 1:
        return type(self).forward(self, hidden_states, cu_seqlens, position_embeddings=position_embeddings, **kwargs)
    n, length = len(lengths), lengths[0]
    qkv = self.qkv(hidden_states).view(n * length, 3, self.num_heads, self.head_dim)
    query, key, value = qkv.unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    query, key, value = (x.view(n, length, self.num_heads, self.head_dim).transpose(1, 2) for x in (query, key, value))
    mixed = functional.scaled_dot_product_attention(query, key, value, scale=self.scaling)
    return self.proj(mixed.transpose(1, 2).reshape(n * length, self.dim))


def batch_vision_attention(visual: torch.nn.Module) -> None:
    """Replaces the tower's loop over images where all images have one size (same result, far fewer calls)."""
    for block in visual.blocks:  # type: ignore[union-attr]
        block.attn.forward = types.MethodType(_batched_attention, block.attn)


@dataclass(frozen=True)
class VisualFeatures:
    """What the language model gets of one or more images, their visual tokens in order of appearance.

    Attributes:
        embeds_NH: [visual tokens, hidden].
        deepstack_KNH: [DeepStack layers, visual tokens, hidden].
    """

    embeds_NH: Tensor
    deepstack_KNH: Tensor


def encode(visual: Any, patches: list[Patches]) -> VisualFeatures:
    """Runs the vision tower on cut frames."""
    pixels = torch.cat([p.pixels for p in patches]).to(visual.device, visual.dtype)
    out = visual(pixels, grid_thw=torch.tensor([p.grid for p in patches], device=visual.device))
    return VisualFeatures(out.pooler_output, torch.stack(out.deepstack_features))


class FeatureCache:
    """Features of frames by content, for a frozen vision tower: each distinct frame is encoded once.

    The composition of an encoding batch could change a result in its last bit, so the cache is cleared at
    every step: the same step then gives the same bits whether or not the run was interrupted before it.
    """

    def __init__(self, visual: Any, patcher: FramePatcher, batch: int = 256) -> None:
        self.visual = visual
        self.patcher = patcher
        self.batch = batch
        self._features: dict[bytes, VisualFeatures] = {}

    def __len__(self) -> int:
        return len(self._features)

    @property
    def tokens(self) -> int:
        """Visual tokens whose features are held: what they take of memory is proportional to it."""
        return sum(len(features.embeds_NH) for features in self._features.values())

    def clear(self) -> None:
        """Forgets all features."""
        self._features.clear()

    @torch.no_grad()
    def gather(self, frames: list[np.ndarray]) -> VisualFeatures:
        """Features of frames in order; those not yet known are encoded first, batched by size."""
        keys = [_content_key(frame) for frame in frames]
        for items in self._unknown(keys, frames):
            self._add(items)
        found = [self._features[key] for key in keys]
        return VisualFeatures(
            torch.cat([f.embeds_NH for f in found]), torch.cat([f.deepstack_KNH for f in found], dim=1)
        )

    @torch.no_grad()
    def fill(self, frames: list[np.ndarray], agree: Callable[[int], int]) -> None:
        """Encodes the frames that are not known yet, in as many batches as ``agree`` makes of the number needed.

        A sharded tower's forward is a collective: every rank must run it as often as the one that needs it most.
        """
        batches = self._unknown([_content_key(frame) for frame in frames], frames)
        rounds = agree(len(batches))  # a collective too: all ranks call it before their first forward
        for items in batches:
            self._add(items)
        for _ in range(rounds - len(batches)):
            encode(self.visual, [self.patcher(frames[0])])

    def _unknown(self, keys: list[bytes], frames: list[np.ndarray]) -> list[list[tuple[bytes, Patches]]]:
        """Frames without features, cut into patches, in batches of one size."""
        fresh: dict[tuple[int, int, int], dict[bytes, Patches]] = {}
        for key, frame in zip(keys, frames, strict=True):
            if key not in self._features:
                patches = self.patcher(frame)
                fresh.setdefault(patches.grid, {})[key] = patches
        groups = [list(group.items()) for group in fresh.values()]
        return [items[i : i + self.batch] for items in groups for i in range(0, len(items), self.batch)]

    def _add(self, items: list[tuple[bytes, Patches]]) -> None:
        out = encode(self.visual, [patches for _, patches in items])
        tokens = len(out.embeds_NH) // len(items)  # one size a batch
        for i, (key, _) in enumerate(items):
            part = slice(i * tokens, (i + 1) * tokens)
            self._features[key] = VisualFeatures(out.embeds_NH[part], out.deepstack_KNH[:, part])


def _content_key(frame: np.ndarray) -> bytes:
    return hashlib.blake2b(frame.tobytes(), digest_size=16, key=repr(frame.shape).encode()).digest()
