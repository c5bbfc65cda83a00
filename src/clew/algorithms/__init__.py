"""Pure functions on tensors: advantages and losses. No I/O, no model."""

from clew.algorithms.advantages import Estimator, discounted_returns, group_advantages, step_advantages
from clew.algorithms.losses import (
    PolicyLoss,
    Reduction,
    entropy_from_logits,
    entropy_from_logprobs,
    kl_k3,
    loss_norm,
    policy_loss,
    reduce_tokens,
    truncated_importance_weights,
)

__all__ = [
    "Estimator",
    "PolicyLoss",
    "Reduction",
    "discounted_returns",
    "entropy_from_logits",
    "entropy_from_logprobs",
    "group_advantages",
    "kl_k3",
    "loss_norm",
    "policy_loss",
    "reduce_tokens",
    "step_advantages",
    "truncated_importance_weights",
]
