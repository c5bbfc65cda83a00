"""Continuous batching in process: answers begin and end at any time, each round gives every one its next token."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clew.errors import UserError
from clew.policy.adapter import Adapter
from clew.rollout.engine import Sampling, uniforms
from clew.rollout.transformers_engine import TransformersEngine

_PREFILL_TOKENS = 8192  # of one round, padding included: what a long prompt may hold up the others
_KEPT_TOKENS = 16_384  # visual ones whose features are kept: thousands of small frames, or one large one


@dataclass(eq=False)
class Answer:
    """An answer in progress.

    Attributes:
        token_ids, grids, frames: what it answers (see ``Context``).
        sampling: its temperature and the most tokens it may have.
        seed: unsigned 64 bits; fixes all its draws.
        on_token: called with the answer after each token, on the thread that computes.
        ids: the sampled tokens, the end of turn included when it was sampled.
        logprobs: their log-probabilities in nats.
        ended: the end of turn was sampled.
        cut: ``max_new_tokens`` are used up without it.
        failed: the kind of error that ended it, or empty.
        dropped: set by whoever asked, from any thread: nobody waits for it any more.
    """

    token_ids: list[int]
    grids: list[tuple[int, int, int]]
    frames: list[np.ndarray]
    sampling: Sampling
    seed: int
    on_token: Callable[[Answer], None]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    cut: bool = False
    failed: str = ""
    dropped: bool = False

    @property
    def living(self) -> bool:
        """Whether it wants another token."""
        return not (self.ended or self.cut or self.failed or self.dropped)


class ContinuousEngine(TransformersEngine):
    """Samples one token an answer and round. Its weights are the model's own, but for the layers an adapter changes.

    Answers at once may have different samplings. What is drawn for an answer does not depend on those beside it (up to
    the last bits of batched arithmetic). Only one thread may compute.

    Attributes:
        rows: how many answers may be in progress at once.
    """

    rows = 32

    def _copy(self, base: Any) -> tuple[Any, Any]:
        """Modules of its own that share the tensors of the model."""
        shared = {id(tensor): tensor for tensor in itertools.chain(base.parameters(), base.buffers())}
        return copy.deepcopy(base.model.language_model, shared).eval(), base.lm_head

    def merging(self, adapter: Adapter) -> Iterator[None]:
        """Merges an adapter that fits (``refuse_foreign_adapter``) layer by layer: little is computed at a time.

        Raises:
            UserError: its numbers are not finite; the engine is of no use then.
        """
        modules = dict(self._language_model.named_modules())
        for factors in adapter.factors():
            module = modules[factors.module]
            with torch.no_grad():
                delta = factors.delta()
                if not delta.isfinite().all():
                    raise UserError(f"adapter {adapter.name}: layer {factors.module} holds numbers that are not finite")
                module.weight = torch.nn.Parameter(module.weight + delta.to(module.weight), requires_grad=False)
            yield
        self.version = adapter.name

    def release(self) -> None:
        """Forgets all answers; features stay, other engines share them."""
        self._cache = self._new_cache()
        self._answers: list[Answer] = []
        self._positions: list[int] = []

    def give_up(self, asked: list[Answer]) -> list[Answer]:
        """Forgets everything after a failed round; returns the answers that are lost, just ``asked`` or not."""
        lost = [answer for answer in dict.fromkeys([*self._answers, *asked]) if answer.living]
        self.release()
        return lost

    @property
    def busy(self) -> bool:
        """Whether an answer is in progress."""
        return any(answer.living for answer in self._answers)

    @property
    def room(self) -> int:
        """How many answers may be added."""
        return self.rows - sum(answer.living for answer in self._answers)

    @torch.inference_mode()
    def round(self, waiting: list[Answer]) -> None:
        """Takes answers off the front of ``waiting`` while there is room, and gives each one in progress a token.

        Raises:
            Exception: whatever went wrong; call ``give_up`` then.
        """
        self._keep_living()
        logits = []
        if self._answers:
            last_B = torch.tensor([answer.ids[-1] for answer in self._answers])
            logits.append(self._decode(last_B, np.ones(len(self._answers), bool)))
        if new := self._admit(waiting):
            logits.append(self._begin(new))
        if self._answers:
            self._sample(torch.cat(logits))

    def _keep_living(self) -> None:
        kept = [row for row, answer in enumerate(self._answers) if answer.living]
        if not kept:
            self.release()
        elif len(kept) < len(self._answers):
            self._cache.select(kept, 0)
            self._positions = [self._positions[row] for row in kept]
            self._answers = [self._answers[row] for row in kept]

    def _admit(self, waiting: list[Answer]) -> list[Answer]:
        admitted: list[Answer] = []
        longest = 0
        while waiting and len(admitted) < self.room:
            longest = max(longest, len(waiting[0].token_ids))
            if admitted and longest * (len(admitted) + 1) > _PREFILL_TOKENS:
                break
            answer = waiting.pop(0)
            if answer.living:
                admitted.append(answer)
        return admitted

    def _begin(self, new: list[Answer]) -> Tensor:
        """Computes new prompts on a cache of their own and puts it behind the others; logits [new, V]."""
        if self.features.tokens > _KEPT_TOKENS:
            self.features.clear()
        cache, positions = self._cache, self._positions
        self._cache, self._positions = self._new_cache(), [0] * len(new)
        self._cache.select([], len(new))
        logits_BV = self._prefill(new)
        if self._answers:
            cache.append(self._cache)
            self._cache = cache
        self._positions = positions + self._positions
        self._answers = self._answers + new
        return logits_BV

    def _sample(self, logits_BV: Tensor) -> None:
        rows_at: dict[float, list[int]] = {}
        for row, answer in enumerate(self._answers):
            rows_at.setdefault(answer.sampling.temperature, []).append(row)
        for temperature, rows in rows_at.items():
            chosen = [self._answers[row] for row in rows]
            numbers = np.array([uniforms(np.array([a.seed], np.uint64), len(a.ids))[0] for a in chosen])
            ids, logprobs = self._draw(logits_BV[rows], temperature, numbers)
            for answer, token, logprob in zip(chosen, ids.tolist(), logprobs.tolist(), strict=True):
                answer.ids.append(token)
                answer.logprobs.append(logprob)
                answer.ended = token == self.vlm.template.end_of_turn_id
                answer.cut = not answer.ended and len(answer.ids) >= answer.sampling.max_new_tokens
        for answer in self._answers:
            answer.on_token(answer)
