"""Token losses: the clipped policy objective, its reductions, KL, importance weights and entropy.

Shape suffixes: B sequences, T tokens, V vocabulary. A mask is 1 (or True) where the model sampled the token.
Nothing outside the mask reaches a result or a gradient, not even NaN or infinity: the mask is applied to the
log-ratios on the way in, which stops the gradient, and to the losses on the way out, which stops the value.

Gradient accumulation is exact: every reduction is a sum over the sequences at hand divided by `norm`, which
the caller derives from the WHOLE batch (`loss_norm`), so that the losses, and the gradients, of its
micro-batches add up to those of the batch. Where a wrapper averages gradients over W ranks (FSDP2), pass
norm / W.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Reduction = Literal["token_mean", "sequence_mean", "dr_grpo"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut to +-20 nats before exp, as in SkyRL: stays finite in float32, far beyond any clip."""


class PolicyLoss(NamedTuple):
    """What `policy_loss` gives: scalars that add up over micro-batches, but for `ratio_max`, a maximum.

    Only `loss` carries gradients. Clip fraction = clipped / tokens; KL a token = kl / tokens.
    """

    loss: Tensor
    """To be minimised."""
    tokens: Tensor
    """Number of tokens in the mask."""
    clipped: Tensor
    """Number of those whose minimum is the clipped branch: they have no gradient."""
    kl: Tensor
    """Sum over those of the k3 estimate of KL(old || new), nats."""
    ratio_max: Tensor
    """Largest new / old probability ratio among those; 0 when there are none."""


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reduction: Reduction,
    norm: float,
    rollout_weights_BT: Tensor | None = None,
) -> PolicyLoss:
    """PPO's clipped objective (arXiv 1707.06347, equation 7), with DAPO's asymmetric clip (arXiv 2503.14476).

    loss of a token = -w x min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A),  r = exp(new - old)

    Args:
        logprobs_BT: float (B, T), nats, of the policy being trained; the only tensor that receives gradients.
        old_logprobs_BT: float (B, T), nats, before the update. With one minibatch an update, `logprobs_BT`
            itself: it is detached here.
        advantages_BT: float, (B, T) or (B, 1).
        mask_BT: bool or 0/1 (B, T).
        reduction, norm: see `reduce_tokens`.
        rollout_weights_BT: float (B, T), w; 1 if None. See `truncated_importance_weights`.
    """
    mask_BT = mask_BT.bool()
    log_ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT.detach(), mask_BT)
    ratio_BT = log_ratio_BT.exp()
    plain_BT = ratio_BT * advantages_BT.detach()
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_BT.detach()
    losses_BT = -torch.minimum(plain_BT, clipped_BT)
    if rollout_weights_BT is not None:
        losses_BT = losses_BT * rollout_weights_BT.detach()
    return PolicyLoss(
        loss=reduce_tokens(losses_BT, mask_BT, reduction=reduction, norm=norm),
        tokens=mask_BT.sum(),
        clipped=(clipped_BT < plain_BT).sum(),
        kl=kl_k3(old_logprobs_BT.detach(), logprobs_BT.detach(), mask_BT).sum(),
        ratio_max=torch.where(mask_BT, ratio_BT.detach(), 0.0).max(),
    )


def reduce_tokens(values_BT: Tensor, mask_BT: Tensor, *, reduction: Reduction, norm: float) -> Tensor:
    """One number of many tokens, as a share of the whole batch (see the module's note on `norm`).

    token_mean:    sum over the tokens / tokens of the batch  (DAPO; SkyRL token_mean, TRL dapo)
    sequence_mean: sum over the sequences of their token mean / sequences of the batch  (GRPO; SkyRL
                   sequence_mean, TRL grpo); a sequence stays whole, a sequence without tokens adds 0
    dr_grpo:       sum over the tokens / (sequences of the batch x a constant)  (Dr. GRPO, arXiv 2503.20783;
                   SkyRL seq_mean_token_sum_norm, TRL dr_grpo)

    Args:
        values_BT: float (B, T).
        mask_BT: bool or 0/1 (B, T).
        norm: what `loss_norm` gives for the whole batch.

    Returns:
        Scalar with the gradients of `values_BT` inside the mask.

    Raises:
        ValueError: unknown reduction.
    """
    mask_BT = mask_BT.bool()
    values_B = torch.where(mask_BT, values_BT, 0.0).sum(-1)
    if reduction == "sequence_mean":
        values_B = values_B / mask_BT.sum(-1).clamp(min=1)
    elif reduction not in ("token_mean", "dr_grpo"):
        raise ValueError(f"unknown reduction {reduction!r}: expected one of {', '.join(get_args(Reduction))}")
    return values_B.sum() / norm


def loss_norm(reduction: Reduction, *, tokens: int, sequences: int, max_tokens: int) -> float:
    """The number by which `reduce_tokens` divides, from the counts of the whole batch (over all ranks).

    Count every trajectory of the update, also those whose advantage is 0 and that are never scored: they are
    part of the mean. An empty batch gives 1.

    Args:
        tokens: tokens in the mask.
        sequences: sequences, also those without tokens.
        max_tokens: dr_grpo's constant, the most tokens a trajectory may sample.

    Raises:
        ValueError: unknown reduction.
    """
    norms = {"token_mean": tokens, "sequence_mean": sequences, "dr_grpo": sequences * max_tokens}
    if reduction not in norms:
        raise ValueError(f"unknown reduction {reduction!r}: expected one of {', '.join(get_args(Reduction))}")
    return float(max(norms[reduction], 1))


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Schulman's k3 estimate in nats a token: exp(d) - 1 - d, d = ref - logprobs (joschu.net/blog/kl-approx).

    Unbiased for KL(p || ref) when p, whose log-probabilities come FIRST, sampled the tokens. Never negative
    but for rounding. Unlike SkyRL's, the estimate itself is not cut at 10.

    Args:
        logprobs, ref_logprobs: float, same shape, nats.
        mask: bool or 0/1; the result is exactly 0 outside it.
    """
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    delta = _log_ratio(ref_logprobs, logprobs, mask)
    return torch.expm1(delta) - delta  # expm1: near 0, exp(d) - 1 would lose all digits of d^2 / 2


@torch.no_grad()
def truncated_importance_weights(trainer_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """min(p_trainer / p_engine, cap): corrects for an engine that is not bit for bit the trainer.

    Truncated importance sampling (fengyao.notion.site/off-policy-rl; SkyRL's token cap is 2.0). No gradients.

    Args:
        trainer_logprobs, engine_logprobs: float, same shape, nats: the sampled tokens, one policy version.
        cap: largest weight.
    """
    log_ratio = (trainer_logprobs - engine_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp().clamp(max=cap)


def entropy_from_logits(logits: Tensor, temperature: float) -> Tensor:
    """Entropy in nats of softmax(logits / temperature) over the last dimension, at least in float32.

    Tokens that may not be sampled have logit -inf and add nothing, to the gradient neither.

    Args:
        logits: float (..., V).
        temperature: > 0, the one that the tokens were sampled with.

    Returns:
        (...), float32 (float64 for float64 logits).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return entropy_from_logprobs(torch.log_softmax(logits / temperature, dim=-1))


def entropy_from_logprobs(logprobs: Tensor) -> Tensor:
    """Entropy in nats over the last dimension, (..., V) to (...); a token of log-probability -inf adds nothing."""
    return -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)


def _log_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """new - old, cut to the limit; masked BEFORE exp, or 0 x NaN would poison the gradient."""
    return torch.where(mask, new - old, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
