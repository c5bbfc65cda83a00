"""The in-process engine: all living episodes in one batch, on a key/value cache that is kept across turns."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from clew.agent.ledger import Trajectory
from clew.checkpoint import verify
from clew.errors import UserError
from clew.policy.adapter import Adapter, StoredAdapter, read_adapter
from clew.policy.model import VisionLanguageModel, masked_log_softmax, rope_positions
from clew.policy.vision import FeatureCache
from clew.rollout.engine import Completion, LockstepEngine, Sampling, uniforms

# What transformers calls it: 5.20, up to which vLLM 0.32 allows, the one, 5.24 the other.
_CACHE = "cache" if "cache" in inspect.signature(Qwen3VLTextModel.forward).parameters else "past_key_values"


class Context(Protocol):
    """What an answer is sampled behind.

    Attributes:
        token_ids: image placeholders expanded.
        grids: (t, h, w) patches of each image, in order of appearance.
        frames: the images, uint8 RGB [height, width, 3], in the same order.
    """

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def grids(self) -> list[tuple[int, int, int]]: ...

    @property
    def frames(self) -> list[np.ndarray]: ...


class RowCache:
    """Keys and values of a batch whose rows have lengths of their own.

    New tokens of row b go behind its ``lengths[b]`` tokens; what a row does not use is masked and overwritten by
    its next tokens. It is handed to transformers as the ``cache`` of a forward call.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (heads, head_dim)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.keys = [torch.empty(0, 0, heads, head_dim, **self._options) for _ in range(layers)]
        self.values = [torch.empty(0, 0, heads, head_dim, **self._options) for _ in range(layers)]
        self.lengths = torch.zeros(0, dtype=torch.long)

    @property
    def room(self) -> int:
        return self.keys[0].shape[1]

    def select(self, rows: list[int], n_new: int) -> None:
        """Keeps ``rows`` in this order and appends ``n_new`` empty ones."""
        kept = torch.tensor(rows, dtype=torch.long)
        if rows != list(range(len(self.lengths))):
            self.keys = [k[kept] for k in self.keys]
            self.values = [v[kept] for v in self.values]
            self.lengths = self.lengths[kept]
        if n_new:
            self.lengths = torch.cat([self.lengths, torch.zeros(n_new, dtype=torch.long)])
            self._resize(self.room)

    def reserve(self, tokens: int) -> None:
        """Makes room for ``tokens`` tokens a row (grows by half, so that copies stay few)."""
        if tokens > self.room:
            self._resize(max(tokens, self.room + self.room // 2))

    def append(self, other: RowCache) -> None:
        """Takes over the rows of another cache, behind its own."""
        room = max(self.room, other.room)
        for cache in (self, other):
            if cache.room < room:
                cache._resize(room)
        self.keys = [torch.cat(pair) for pair in zip(self.keys, other.keys, strict=True)]
        self.values = [torch.cat(pair) for pair in zip(self.values, other.values, strict=True)]
        self.lengths = torch.cat([self.lengths, other.lengths])

    def _resize(self, room: int) -> None:
        def grown(old: Tensor) -> Tensor:
            new = torch.zeros(len(self.lengths), room, *self._shape, **self._options)
            new[: old.shape[0], : old.shape[1]] = old
            return new

        self.keys = [grown(k) for k in self.keys]
        self.values = [grown(v) for v in self.values]

    def begin(self, n_new: int) -> Tensor:
        """Readies the cache for ``n_new`` tokens a row; returns the attention mask, bool [B, 1, n_new, room used]."""
        self.slots = self.lengths.unsqueeze(1) + torch.arange(n_new)
        self.used = int(self.slots.max()) + 1
        self.reserve(self.used)
        self.rows = torch.arange(len(self.lengths)).unsqueeze(1)
        return (torch.arange(self.used) <= self.slots.unsqueeze(-1)).unsqueeze(1).to(self._options["device"])

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values, [B, heads, n_new, head_dim], and returns all of them."""
        self.keys[layer][self.rows, self.slots] = key.transpose(1, 2)
        self.values[layer][self.rows, self.slots] = value.transpose(1, 2)
        return self.keys[layer][:, : self.used].transpose(1, 2), self.values[layer][:, : self.used].transpose(1, 2)


class TransformersEngine(LockstepEngine):
    """Samples with a copy of the language model into which the adapter is merged.

    The vision tower is the policy's own: it is frozen, so each distinct frame is encoded once a step and its
    features serve sampler and trainer alike.
    """

    def __init__(self, vlm: VisionLanguageModel, features: FeatureCache) -> None:
        super().__init__()
        base = vlm.model
        self.vlm = vlm
        self.features = features
        self.version = "base"
        self._language_model, self._lm_head = self._copy(base)
        self._base_weights: dict[str, Tensor] = {}
        config = base.config.text_config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._new_cache = lambda: RowCache(
            config.num_hidden_layers, config.num_key_value_heads, head_dim, base.dtype, base.device
        )
        self.release()

    def _copy(self, base: Any) -> tuple[Any, Any]:
        """The language model and the output layer that this engine computes with."""
        language_model = _bare_copy(base.model.language_model).requires_grad_(False).eval()
        return language_model, copy.deepcopy(base.lm_head).requires_grad_(False)

    def load_adapter(self, adapter: Adapter | StoredAdapter | None) -> None:
        """Merges an adapter into this engine's weights (None: the base model). The base weights are kept.

        Raises:
            UserError: the adapter is damaged, belongs to another model or is no plain LoRA; the engine has the base
                model then.
        """
        self._unmerge()
        if isinstance(adapter, StoredAdapter):
            verify(adapter.folder)
            adapter = replace(read_adapter(adapter.folder), name=adapter.name)
        if adapter is not None:
            try:
                self._merge(adapter)
            except UserError:
                self._unmerge()
                raise

    def _unmerge(self) -> None:
        modules = dict(self._language_model.named_modules())
        with torch.no_grad():
            for name, weight in self._base_weights.items():
                modules[name].weight.copy_(weight)
        self._base_weights = {}
        self.version = "base"
        self.release()

    @torch.no_grad()
    def _merge(self, adapter: Adapter) -> None:
        modules = dict(self._language_model.named_modules())
        for name, delta in adapter.deltas():
            weight = getattr(modules.get(name), "weight", None)
            if weight is None or weight.shape != delta.shape:
                raise UserError(
                    f"adapter {adapter.name} does not fit the model {self.vlm.path} (layer {name}); it was trained on "
                    f"{adapter.config.get('base_model_name_or_path')}"
                )
            self._base_weights[name] = weight.clone()
            weight += delta.to(weight)
        self.version = adapter.name

    def release(self) -> None:
        """Forgets all trajectories and features."""
        self._cache = self._new_cache()
        self._rows: list[Trajectory] = []
        self._positions: list[int] = []
        self.features.clear()

    @torch.inference_mode()
    def sample(self, trajectories: list[Trajectory], sampling: Sampling, seeds: list[int]) -> list[Completion]:
        """Answers each trajectory once (see ``LockstepEngine.sample``)."""
        order = self._place(trajectories)
        by_row = [trajectories[i] for i in order]
        row_seeds = np.array([seeds[i] for i in order], dtype=np.uint64)
        logits_BV = self._prefill(by_row)
        answers: list[list[int]] = [[] for _ in by_row]
        logprobs: list[list[float]] = [[] for _ in by_row]
        ended = np.zeros(len(by_row), bool)
        end_id = self.vlm.template.end_of_turn_id
        for index in range(sampling.max_new_tokens):
            ids_B, chosen_B = self._draw(logits_BV, sampling.temperature, uniforms(row_seeds, index))
            ids, chosen = ids_B.tolist(), chosen_B.tolist()
            for row in np.flatnonzero(~ended):
                answers[row].append(ids[row])
                logprobs[row].append(chosen[row])
            ended |= ids_B.numpy() == end_id
            if ended.all() or index + 1 == sampling.max_new_tokens:
                break
            logits_BV = self._decode(ids_B, ~ended)
        completions = [Completion(a, lp, bool(e)) for a, lp, e in zip(answers, logprobs, ended, strict=True)]
        placed = dict(zip(order, completions, strict=True))
        return [placed[i] for i in range(len(trajectories))]

    def _place(self, trajectories: list[Trajectory]) -> list[int]:
        """Compacts the cache to these trajectories; returns the order in which they lie in its rows."""
        wanted = {id(t): i for i, t in enumerate(trajectories)}
        kept = [row for row, t in enumerate(self._rows) if id(t) in wanted]
        order = [wanted[id(self._rows[row])] for row in kept]
        known = set(order)
        new = [i for i in range(len(trajectories)) if i not in known]
        self._cache.select(kept, len(new))
        self._positions = [self._positions[row] for row in kept] + [0] * len(new)
        order += new
        self._rows = [trajectories[i] for i in order]
        return order

    def _prefill(self, trajectories: Sequence[Context]) -> Tensor:
        """Computes what each ledger has beyond the cache; returns the logits behind its last token, [B, V]."""
        template, merge = self.vlm.template, self.vlm.merge_size
        done = self._cache.lengths.tolist()
        fresh = [t.token_ids[n:] for t, n in zip(trajectories, done, strict=True)]
        counts = [len(ids) for ids in fresh]
        width = max(counts)
        ids_BT = np.zeros((len(fresh), width), np.int64)
        positions_3BT = np.zeros((3, len(fresh), width), np.int64)
        real_BT = np.zeros((len(fresh), width), bool)
        frames: list[np.ndarray] = []
        for row, (trajectory, n) in enumerate(zip(trajectories, done, strict=True)):
            ids_BT[row, : counts[row]] = fresh[row]
            real_BT[row, : counts[row]] = True
            whole = rope_positions(trajectory.token_ids, trajectory.grids, template.image_token_id, merge)
            positions_3BT[:, row, : counts[row]] = whole[:, n:]
            self._positions[row] = int(whole.max()) + 1
            per_image = [t * h * w // merge**2 for t, h, w in trajectory.grids]
            unseen = fresh[row].count(template.image_token_id)
            shown = 0
            while unseen > 0:
                shown += 1
                unseen -= per_image[-shown]
            frames += trajectory.frames[len(trajectory.frames) - shown :]
        embeds_BTH = self._language_model.embed_tokens(torch.from_numpy(ids_BT).to(self.vlm.device))
        visual: dict[str, Any] = {}
        if frames:
            image_BT = torch.from_numpy((ids_BT == template.image_token_id) & real_BT)
            features = self.features.gather(frames)
            image_BT = image_BT.to(self.vlm.device)
            embeds_BTH = embeds_BTH.masked_scatter(image_BT.unsqueeze(-1), features.embeds_NH)
            visual = {"visual_pos_masks": image_BT, "deepstack_visual_embeds": list(features.deepstack_KNH)}
        hidden_BTH = self._forward(embeds_BTH, torch.from_numpy(positions_3BT), **visual)
        counts_B = torch.tensor(counts)
        self._cache.lengths += counts_B
        return self._lm_head(hidden_BTH[torch.arange(len(counts)), counts_B - 1])

    def _decode(self, ids_B: Tensor, advance: np.ndarray) -> Tensor:
        """Appends one sampled token a row; rows that have ended do not advance (theirs is written over later)."""
        positions_B = torch.tensor(self._positions)
        hidden_BTH = self._forward(
            self._language_model.embed_tokens(ids_B.to(self.vlm.device).unsqueeze(1)),
            positions_B.view(1, -1, 1).expand(3, -1, 1),
        )
        self._cache.lengths += torch.from_numpy(advance.astype(np.int64))
        self._positions = [p + int(a) for p, a in zip(self._positions, advance, strict=True)]
        return self._lm_head(hidden_BTH[:, 0])

    def _forward(self, embeds_BTH: Tensor, positions_3BT: Tensor, **visual: Any) -> Tensor:
        return self._language_model(
            inputs_embeds=embeds_BTH,
            position_ids=positions_3BT.to(self.vlm.device),
            attention_mask=self._cache.begin(embeds_BTH.shape[1]),
            use_cache=True,
            **{_CACHE: self._cache},
            **visual,
        ).last_hidden_state

    def _draw(self, logits_BV: Tensor, temperature: float, uniform_B: np.ndarray) -> tuple[Tensor, Tensor]:
        """One token a row from the full vocabulary by inverse transform sampling: ids and log-probabilities."""
        logprobs_BV = masked_log_softmax(logits_BV, self.vlm.forbidden_ids, temperature or 1.0).cpu()
        if temperature == 0:
            ids_B = logprobs_BV.argmax(-1)
        else:
            cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
            threshold_B1 = torch.from_numpy(uniform_B).unsqueeze(1) * cumulative_BV[:, -1:]
            ids_B = (cumulative_BV <= threshold_B1).sum(-1)
        return ids_B, logprobs_BV.gather(-1, ids_B.unsqueeze(-1)).squeeze(-1)


def _bare_copy(language_model: Any) -> Any:
    """A copy without the LoRA layers that may be attached: this engine merges its adapter instead."""
    copied = copy.deepcopy(language_model)
    for name, layer in list(copied.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            parent, _, leaf = name.rpartition(".")
            setattr(copied.get_submodule(parent), leaf, layer.get_base_layer())
    return copied
