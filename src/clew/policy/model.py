"""A Qwen3-VL policy: loading a folder, scoring tokens, and the LoRA adapter on its language model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from clew.agent.template import ChatTemplate
from clew.algorithms import entropy_from_logprobs
from clew.errors import UserError
from clew.policy.vision import FramePatcher, VisualFeatures, batch_vision_attention

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


@dataclass
class VisionLanguageModel:
    """A loaded model folder with what is needed to talk to it.

    Attributes:
        path: the folder (or hub id) it was loaded from.
        model: the ``Qwen3VLForConditionalGeneration``; LoRA layers, when attached, sit inside it.
        template: chat pieces as token ids.
        patcher: frames to patches.
        forbidden_ids: tokens that are never sampled (vision placeholders and ids beyond the tokenizer).
    """

    path: str
    model: Any
    tokenizer: Any
    template: ChatTemplate
    patcher: FramePatcher
    forbidden_ids: Tensor

    @property
    def merge_size(self) -> int:
        return self.model.config.vision_config.spatial_merge_size

    @property
    def device(self) -> torch.device:
        return self.model.device


@dataclass(frozen=True)
class ModelProcessor:
    """What talks to a model whose weights are elsewhere: its tokenizer and its image processor.

    Attributes:
        path: the folder (or hub id) it was loaded from.
        config: the ``Qwen3VLConfig``.
        template: chat pieces as token ids.
        patcher: frames to patches.
        forbidden_ids: tokens that are never sampled (see ``VisionLanguageModel``), ascending.
    """

    path: str
    config: Any
    template: ChatTemplate
    patcher: FramePatcher
    forbidden_ids: list[int]


def load_model(path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> VisionLanguageModel:
    """Loads a Qwen3-VL folder (or hub id).

    Raises:
        UserError: the folder is missing, is no Qwen3-VL, or lacks a part.
    """
    _load_config(path)
    model = _load(AutoModelForImageTextToText, path, dtype=dtype).to(device).eval()
    return assemble(str(path), model, _load(AutoTokenizer, path), _load(AutoImageProcessor, path))


def load_skeleton(path: str | Path) -> VisionLanguageModel:
    """A Qwen3-VL folder (or hub id) without its weights: all modules and their shapes, on the meta device.

    Raises:
        UserError: the folder is missing, is no Qwen3-VL, or lacks a part.
    """
    config = _load_config(path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    return assemble(str(path), model, _load(AutoTokenizer, path), _load(AutoImageProcessor, path))


def load_processor(path: str | Path) -> ModelProcessor:
    """Loads what a Qwen3-VL folder (or hub id) has beside its weights.

    Raises:
        UserError: the folder is missing, is no Qwen3-VL, or lacks a part.
    """
    config = _load_config(path)
    tokenizer, image_processor = _load(AutoTokenizer, path), _load(AutoImageProcessor, path)
    return ModelProcessor(
        path=str(path),
        config=config,
        template=ChatTemplate(tokenizer),
        patcher=FramePatcher(image_processor),
        forbidden_ids=_forbidden_ids(tokenizer, config),
    )


def _load_config(path: str | Path) -> Any:
    config = _load(AutoConfig, path)
    if config.model_type != "qwen3_vl":
        raise UserError(f"model.path: {path} is a {config.model_type} model; Clew trains qwen3_vl models")
    return config


def _load(part: Any, path: str | Path, **options: Any) -> Any:
    try:
        return part.from_pretrained(path, **options)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.path: {path} can't be loaded as a Hugging Face model folder ({reason})") from error


def assemble(path: str, model: Any, tokenizer: Any, image_processor: Any) -> VisionLanguageModel:
    """Puts a model and its tokenizer and image processor together."""
    batch_vision_attention(model.model.visual)
    return VisionLanguageModel(
        path=path,
        model=model,
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer),
        patcher=FramePatcher(image_processor),
        forbidden_ids=torch.tensor(_forbidden_ids(tokenizer, model.config), device=model.device),
    )


def _forbidden_ids(tokenizer: Any, config: Any) -> list[int]:
    vocab = config.text_config.vocab_size
    forbidden = {tokenizer.convert_tokens_to_ids(t) for t in VISION_TOKENS} & set(range(vocab))
    return sorted(forbidden | set(range(len(tokenizer), vocab)))  # padding of the embedding matrix


def rope_positions(
    token_ids: list[int], grids: list[tuple[int, int, int]], image_token_id: int, merge_size: int
) -> np.ndarray:
    """M-RoPE positions (temporal, height, width) of a whole sequence, int64 [3, T].

    Text counts up by one on all three axes; an image's tokens share one temporal position and spread over rows
    and columns; what follows goes on from the largest side (Qwen3-VL's ``get_rope_index``). Always computed from
    the ids and grids at hand: the offsets a model stores from an earlier call may belong to another batch.

    Raises:
        ValueError: the placeholders do not match the grids.
    """
    places = np.flatnonzero(np.asarray(token_ids) == image_token_id)
    sides = [(t, h // merge_size, w // merge_size) for t, h, w in grids]
    ends = np.cumsum([t * h * w for t, h, w in sides], dtype=np.int64)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    if len(places) > (ends[-1] if sides else 0):
        raise ValueError(f"more image placeholders than the grids {grids} account for")
    if sides and (len(places) < ends[-1] or (places[ends - 1] - places[starts] != ends - 1 - starts).any()):
        raise ValueError(f"image placeholders do not match the grids {grids}")
    # How far each token moves the position of the next one: text by 1, an image by its larger side, at its end.
    moves = np.ones(len(token_ids), np.int64)
    moves[places] = 0
    if sides:
        moves[places[ends - 1]] = [max(h, w) for _, h, w in sides]
    positions = np.tile(np.cumsum(moves) - moves, (3, 1))
    if sides:
        positions[:, places] += np.concatenate([_image_offsets(*side) for side in sides], axis=1)
    return positions


@lru_cache(maxsize=256)
def _image_offsets(t: int, h: int, w: int) -> np.ndarray:
    """Positions of an image's tokens relative to its first: int64 [3, t * h * w]."""
    return np.stack(
        [np.zeros(t * h * w, np.int64), np.tile(np.repeat(np.arange(h), w), t), np.tile(np.arange(w), t * h)]
    )


@dataclass(frozen=True)
class TokenBatch:
    """Sequences side by side, padded on the right.

    Attributes:
        ids_BT: int64 token ids (padding: any valid id; nothing is ever inferred from it).
        positions_3BT: int64 M-RoPE positions.
        image_BT: bool, the visual placeholders.
        scored_BT: bool, the tokens whose log-probability is wanted (never column 0).
        lengths: real tokens of each row.
    """

    ids_BT: Tensor
    positions_3BT: Tensor
    image_BT: Tensor
    scored_BT: Tensor
    lengths: list[int]


def collate(
    sequences: list[tuple[list[int], list[bool], list[tuple[int, int, int]]]],
    image_token_id: int,
    merge_size: int,
) -> TokenBatch:
    """Pads (token ids, scored mask, grids) triples into a batch."""
    lengths = [len(ids) for ids, _, _ in sequences]
    shape = (len(sequences), max(lengths))
    ids_BT = np.zeros(shape, np.int64)
    positions_3BT = np.zeros((3, *shape), np.int64)
    real_BT = np.zeros(shape, bool)
    scored_BT = np.zeros(shape, bool)
    for row, (ids, scored, grids) in enumerate(sequences):
        ids_BT[row, : len(ids)] = ids
        positions_3BT[:, row, : len(ids)] = rope_positions(ids, grids, image_token_id, merge_size)
        scored_BT[row, : len(ids)] = scored
        real_BT[row, : len(ids)] = True
    image_BT = (ids_BT == image_token_id) & real_BT
    return TokenBatch(
        ids_BT=torch.from_numpy(ids_BT),
        positions_3BT=torch.from_numpy(positions_3BT),
        image_BT=torch.from_numpy(image_BT),
        scored_BT=torch.from_numpy(scored_BT),
        lengths=lengths,
    )


def hidden_states(base: Any, batch: TokenBatch, features: VisualFeatures) -> Tensor:
    """Last hidden states of a batch, [B, T, hidden].

    Rows are padded on the right and attention is causal, so padding needs no mask.

    Args:
        base: the ``Qwen3VLForConditionalGeneration`` (LoRA layers may be inside).
        features: of all images, in the order in which the batch's rows show them.
    """
    device = base.device
    image_BT = batch.image_BT.to(device)
    embeds_BTH = base.model.language_model.embed_tokens(batch.ids_BT.to(device))
    visual_NH = features.embeds_NH.to(embeds_BTH.dtype)
    if int(batch.image_BT.sum()) != visual_NH.shape[0]:
        raise ValueError(f"{int(batch.image_BT.sum())} image placeholders for {visual_NH.shape[0]} visual tokens")
    embeds_BTH = embeds_BTH.masked_scatter(image_BT.unsqueeze(-1), visual_NH)
    return base.model.language_model(
        inputs_embeds=embeds_BTH,
        position_ids=batch.positions_3BT.to(device),
        visual_pos_masks=image_BT,
        deepstack_visual_embeds=list(features.deepstack_KNH),
        use_cache=False,
    ).last_hidden_state


@dataclass(frozen=True)
class TokenScores:
    """Scores of the tokens marked in ``scored_BT``, flat in row-major order (N tokens).

    Attributes:
        logprobs_N: log-probabilities in nats, at the sampling temperature, vision tokens masked out.
        entropy_N: entropy of the distribution each token was drawn from, in nats (no gradient).
    """

    logprobs_N: Tensor
    entropy_N: Tensor


def masked_log_softmax(logits_NV: Tensor, forbidden_ids: Tensor, temperature: float) -> Tensor:
    """Log-probabilities as sampled: forbidden tokens excluded, logits divided by the temperature, float32.

    Sampler and scorer both call this, so they can't disagree on mask or temperature (truth 2).
    """
    scaled_NV = logits_NV.float() / temperature
    if len(forbidden_ids):
        scaled_NV = scaled_NV.index_fill(-1, forbidden_ids, float("-inf"))
    return torch.log_softmax(scaled_NV, dim=-1)


def score(vlm: VisionLanguageModel, batch: TokenBatch, features: VisualFeatures, temperature: float) -> TokenScores:
    """Log-probability and entropy of the scored tokens of a batch under the current weights."""
    hidden_BTH = hidden_states(vlm.model, batch, features)
    scored_BT = batch.scored_BT.to(hidden_BTH.device)
    # The state before a token predicts it.
    logits_NV = vlm.model.lm_head(hidden_BTH[:, :-1][scored_BT[:, 1:]])
    logprobs_NV = masked_log_softmax(logits_NV, vlm.forbidden_ids, temperature)
    targets_N = batch.ids_BT.to(hidden_BTH.device)[scored_BT]
    logprobs_N = logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy_N = entropy_from_logprobs(logprobs_NV)
    return TokenScores(logprobs_N, entropy_N)
