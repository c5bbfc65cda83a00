"""One policy update: from trajectories with advantages to new LoRA weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.tensor import DTensor

from clew.agent.ledger import Trajectory
from clew.algorithms import (
    PolicyLoss,
    kl_k3,
    loss_norm,
    policy_loss,
    reduce_tokens,
    truncated_importance_weights,
)
from clew.policy.model import TokenScores, VisionLanguageModel, collate, score
from clew.policy.vision import FeatureCache
from clew.recipe import AlgorithmTable, TrainingTable
from clew.training.ranks import ALONE, Ranks, balanced


@dataclass(frozen=True)
class Sample:
    """A trajectory with the advantage of each of its turns.

    Attributes:
        advantages: one a turn, in the order of ``trajectory.turns``.
    """

    trajectory: Trajectory
    advantages: list[float]


class Updater:
    """Holds the policy and its optimizer and turns samples into an update.

    Several ranks share the work: each computes the sequences that ``balanced`` gives it, and the gradients are those
    of the loss over all of them. Where the policy is sharded, every forward is a collective, so all ranks run the
    same number of micro-batches; who has fewer repeats one with weight 0.

    Args:
        tis_cap: cap of a token's importance weight between trainer and engine; None: no correction.
    """

    def __init__(
        self,
        vlm: VisionLanguageModel,
        peft_model: PeftModel,
        features: FeatureCache,
        algorithm: AlgorithmTable,
        training: TrainingTable,
        temperature: float,
        max_tokens: int,
        tis_cap: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.vlm, self.peft_model, self.features = vlm, peft_model, features
        self.algorithm, self.training = algorithm, training
        self.temperature, self.max_tokens, self.tis_cap = temperature, max_tokens, tis_cap
        self.ranks = ranks
        self.parameters = [p for p in peft_model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=training.learning_rate, betas=(0.9, 0.95), weight_decay=training.weight_decay
        )

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step (counted from 1): warm-up, then the recipe's schedule."""
        t = self.training
        if step <= t.warmup_steps:
            return t.learning_rate * step / t.warmup_steps
        done = (step - t.warmup_steps - 1) / max(t.steps - t.warmup_steps, 1)
        shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        return t.learning_rate * shape[t.schedule]

    def update(self, samples: list[Sample], used: list[bool], step: int) -> dict[str, float]:
        """Runs the step's epochs and minibatches over the used samples; returns metrics.

        Args:
            samples: all trajectories that count; the loss is a mean over all of them.
            used: which of them carry signal (the others' advantages are 0: they are counted, not computed).
            step: training step, from 1.
        """
        lr = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics = _Sums()
        chunks = [self._minibatch(*chunk) for chunk in _split(samples, used, self.training.minibatches)]
        chunks = [chunk for chunk in chunks if chunk.parts]
        if self.ranks.size > 1:
            shown = [s.trajectory for chunk in chunks for part in chunk.parts for s in part]
            frames = [turn.frame for trajectory in shown for turn in trajectory.turns]
            self.features.fill(frames, lambda batches: int(self.ranks.highest([batches])[0]))
        # With a single update the old policy is the current one: its log-probabilities are those of the loss.
        several = self.training.minibatches * self.training.epochs > 1
        old = self._score_all([part for chunk in chunks for part in chunk.parts]) if several else {}
        for _ in range(self.training.epochs):
            for chunk in chunks:
                self._optimize(chunk, old, metrics)
        return {**metrics.result(self.ranks), "train/learning_rate": lr}

    def _minibatch(self, samples: list[Sample], used: list[bool]) -> _Minibatch:
        """This rank's share of a minibatch, as micro-batches."""
        computed = [s for s, u in zip(samples, used, strict=True) if u]
        if not computed:
            return _Minibatch([], 0, 1.0)
        norm = loss_norm(
            self.algorithm.loss_reduction,
            tokens=sum(sum(s.trajectory.sampled) for s in samples),
            sequences=len(samples),
            max_tokens=self.max_tokens,
        )
        shares = balanced([len(s.trajectory.token_ids) for s in computed], self.ranks.size)
        parts = list(self._microbatches([computed[i] for i in shares[self.ranks.rank]]))
        rounds = int(self.ranks.highest([len(parts)])[0])
        shortest = min(computed, key=lambda s: len(s.trajectory.token_ids))
        return _Minibatch(parts + [[shortest]] * (rounds - len(parts)), len(parts), norm)

    def _optimize(self, minibatch: _Minibatch, old: dict[int, Tensor], metrics: _Sums) -> None:
        self.optimizer.zero_grad()
        loss_sum = 0.0
        self.peft_model.train()  # LoRA dropout, if any, is for the gradient alone
        for number, part in enumerate(minibatch.parts):
            if number < minibatch.real:
                loss_sum += self._accumulate(part, minibatch.norm, old, metrics)
            else:
                self._accumulate(part, minibatch.norm, old, _Sums(), weight=0.0)
        self.peft_model.eval()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.max_grad_norm)
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        (loss_sum,) = self.ranks.sums([loss_sum])
        if not math.isfinite(loss_sum) or not torch.isfinite(grad_norm):
            metrics.skipped += 1
            return
        self.optimizer.step()
        metrics.updates += 1
        metrics.loss += loss_sum
        metrics.grad_norm += float(grad_norm)

    def _accumulate(
        self, part: list[Sample], norm: float, old: dict[int, Tensor], metrics: _Sums, weight: float = 1.0
    ) -> float:
        """Adds the gradients of one micro-batch; returns its share of the loss."""
        scores, mask_BT = self._score(part)
        logprobs_BT = _spread(scores.logprobs_N, mask_BT)
        advantages_BT = _turn_values(part, mask_BT)
        engine_BT = _padded([s.trajectory.logprobs for s in part], mask_BT)
        old_BT = _padded([old[id(s)].tolist() for s in part], mask_BT) if old else logprobs_BT.detach()
        a = self.algorithm
        weights_BT = truncated_importance_weights(old_BT, engine_BT, self.tis_cap) if self.tis_cap else None
        result = policy_loss(
            logprobs_BT,
            old_BT,
            advantages_BT,
            mask_BT,
            clip_low=a.clip_low,
            clip_high=a.clip_high,
            reduction=a.loss_reduction,
            norm=norm,
            rollout_weights_BT=weights_BT,
        )
        loss = result.loss
        if a.kl_coef > 0:
            with torch.no_grad(), self.peft_model.disable_adapter():
                base_scores, _ = self._score(part)
            kl_BT = kl_k3(logprobs_BT, _spread(base_scores.logprobs_N, mask_BT), mask_BT)
            loss = loss + a.kl_coef * reduce_tokens(kl_BT, mask_BT, reduction=a.loss_reduction, norm=norm)
            metrics.kl_base += float(kl_BT.detach().sum())
        # The ranks' gradients are averaged, and the loss is a sum over them.
        (loss * (weight * self.ranks.size)).backward()
        metrics.add(result, scores, (old_BT - engine_BT)[mask_BT])
        return float(loss.detach())

    def _score(self, part: list[Sample]) -> tuple[TokenScores, Tensor]:
        trajectories = [s.trajectory for s in part]
        merge, image_id = self.vlm.merge_size, self.vlm.template.image_token_id
        for trajectory in trajectories:
            trajectory.check_images(image_id, merge)
        batch = collate([(t.token_ids, t.sampled, t.grids) for t in trajectories], image_id, merge)
        frames = [turn.frame for t in trajectories for turn in t.turns]
        scores = score(self.vlm, batch, self.features.gather(frames), self.temperature)
        return scores, batch.scored_BT.to(scores.logprobs_N.device)

    @torch.no_grad()
    def _score_all(self, parts: list[list[Sample]]) -> dict[int, Tensor]:
        """Log-probabilities of each sample under the policy before the update: [T], zeros where not sampled."""
        found: dict[int, Tensor] = {}
        for part in parts:
            scores, mask_BT = self._score(part)
            for sample, row in zip(part, _spread(scores.logprobs_N, mask_BT), strict=True):
                found[id(sample)] = row[: len(sample.trajectory.token_ids)].clone()
        return found

    def _microbatches(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        """Rows of similar length whose padded size stays within the token budget, longest first."""
        rest = sorted(samples, key=lambda s: len(s.trajectory.token_ids))
        while rest:
            part = [rest.pop()]
            width = len(part[0].trajectory.token_ids)
            while rest and (len(part) + 1) * width <= self.training.tokens_per_microbatch:
                part.append(rest.pop())
            yield part


class _Minibatch(NamedTuple):
    """What a rank computes for one optimizer update.

    Attributes:
        parts: micro-batches; those from ``real`` on only keep step with the other ranks.
        norm: divisor of the loss, over all ranks (see ``loss_norm``).
    """

    parts: list[list[Sample]]
    real: int
    norm: float


class _Sums:
    """Sums over the micro-batches of a step, and what they come to."""

    def __init__(self) -> None:
        self.updates = self.skipped = 0
        self.loss = self.grad_norm = self.kl = self.kl_base = self.clipped = self.entropy = 0.0
        self.ratio_max = self.gap = self.gap_max = 0.0
        self.tokens = 0

    def add(self, result: PolicyLoss, scores: TokenScores, gap_N: Tensor) -> None:
        self.tokens += int(result.tokens)
        self.clipped += float(result.clipped)
        self.kl += float(result.kl)
        self.ratio_max = max(self.ratio_max, float(result.ratio_max))
        self.entropy += float(scores.entropy_N.sum())
        self.gap += float(gap_N.abs().sum())
        self.gap_max = max(self.gap_max, float(gap_N.abs().max()))

    def result(self, ranks: Ranks) -> dict[str, float]:
        tokens, clipped, kl, kl_base, entropy, gap = ranks.sums(
            [self.tokens, self.clipped, self.kl, self.kl_base, self.entropy, self.gap]
        )
        ratio_max, gap_max = ranks.highest([self.ratio_max, self.gap_max])
        tokens, updates = max(tokens, 1), max(self.updates, 1)
        return {
            "train/updates": self.updates,
            "train/skipped_nonfinite": self.skipped,
            "train/loss": self.loss / updates,
            "train/grad_norm": self.grad_norm / updates,
            "policy/entropy": entropy / tokens,
            "policy/kl": kl / tokens,
            "policy/kl_base": kl_base / tokens,
            "policy/clip_fraction": clipped / tokens,
            "policy/ratio_max": ratio_max,
            "policy/logprob_gap_mean": gap / tokens,
            "policy/logprob_gap_max": gap_max,
        }


def _split(samples: list[Sample], used: list[bool], minibatches: int) -> list[tuple[list[Sample], list[bool]]]:
    """Contiguous minibatches of (nearly) equal size: groups lie together, so most stay whole."""
    size = -(-len(samples) // minibatches)
    return [(samples[i : i + size], used[i : i + size]) for i in range(0, len(samples), size)]


def _spread(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Flat values of the marked tokens as [B, T], zero elsewhere."""
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device).masked_scatter(mask_BT, values_N)


def _padded(rows: list[list[float]], mask_BT: Tensor) -> Tensor:
    width = mask_BT.shape[1]
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], device=mask_BT.device)


def _turn_values(part: list[Sample], mask_BT: Tensor) -> Tensor:
    """Each answer token gets the advantage of its turn, [B, T]."""
    values_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
    for row, sample in enumerate(part):
        for turn, advantage in zip(sample.trajectory.turns, sample.advantages, strict=True):
            values_BT[row, turn.start : turn.end] = advantage
    return values_BT


def no_update_metrics(learning_rate: float) -> dict[str, float]:
    """The update metrics of a step in which no group carried signal: a counted no-op."""
    return {**_Sums().result(ALONE), "train/learning_rate": learning_rate}


@contextlib.contextmanager
def deterministic_dropout(seed: int) -> Iterator[None]:
    """Seeds torch for the update alone: dropout, if any, then depends on the step and not on what ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        yield
