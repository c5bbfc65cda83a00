"""Advantages: how much better an episode, or one of its turns, went than its peers on the same task.

Shape suffixes: N trajectories, M turns (the turns of all trajectories, laid end to end).
Everything is computed in float64 and returned in the dtype of the rewards. The sums run in the order of the
input: permuting the trajectories permutes the advantages, up to the rounding of a float64 sum.
"""

from typing import Literal

import torch
from torch import Tensor

from clew.errors import UserError

Estimator = Literal["grpo", "grpo_no_std"]


def group_advantages(
    rewards_N: Tensor, group_ids_N: Tensor, *, estimator: Estimator, epsilon: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Advantage of each trajectory relative to the trajectories of its own task.

    grpo:        (R - mean) / (std + epsilon), unbiased std (DeepSeekMath, arXiv 2402.03300; the default
                 epsilon is TRL's, SkyRL uses 1e-6)
    grpo_no_std: R - mean (Dr. GRPO, arXiv 2503.20783)

    Groups may differ in size: a trajectory lost to a broken machine is left out by the caller. A group of
    one has no peers to be compared with and gets R itself (SkyRL: R / (1 + epsilon)). Rewards that are all
    equal give exactly 0; they are recognised by comparing them, because sums round: with float32 and an
    epsilon of 1e-6, SkyRL 0.4.0 gives eight rewards of 0.7 an advantage of 0.056 each.

    Args:
        rewards_N: float (N,), finite.
        group_ids_N: int64 (N,), one id a task.

    Returns:
        advantages_N: (N,), dtype of the rewards.
        used_N: bool (N,), False where the whole group carries no signal (equal rewards; alone with reward 0).

    Raises:
        UserError: a reward is not finite.
        ValueError: unknown estimator.
    """
    _check_finite(rewards_N, "reward")
    _, group_N = torch.unique(group_ids_N, return_inverse=True)
    relative_N, equal_N, size_N = _relative_to_segment(rewards_N.double(), group_N, estimator, epsilon)
    alone_N = size_N == 1
    advantages_N = torch.where(alone_N, rewards_N.double(), relative_N)
    used_N = torch.where(alone_N, rewards_N != 0, ~equal_N)
    return advantages_N.to(rewards_N.dtype), used_N


def step_advantages(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    returns_M: Tensor,
    trajectory_M: Tensor,
    anchors_M: Tensor,
    *,
    weight: float = 1.0,
    estimator: Estimator = "grpo",
    epsilon: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Advantage of each turn: GiGPO (arXiv 2505.10978), equations 3 and 6 to 8; public code: verl-agent.

    advantage = episode advantage + weight x step advantage. The step advantage compares a turn's discounted
    return with those of all turns, of any trajectory of the group, that were taken in the same anchor state:
    the same two centring rules as `group_advantages`. A state met once gives 0. The episode part counts each
    trajectory once (equation 3), where verl-agent's default weighs it by its number of turns.

    A group whose episodes all have the same reward can still carry signal: with a discount below 1, the way
    that reached the goal sooner is preferred.

    Args:
        rewards_N, group_ids_N: as for `group_advantages`.
        returns_M: float (M,), see `discounted_returns`.
        trajectory_M: int64 (M,), index into N of the trajectory that a turn belongs to.
        anchors_M: int64 (M,), a key of the state a turn was taken in; within a group, equal keys mean the
            same state. Make it from a content hash: Python's `hash` of a string differs between processes.
        weight: omega in the paper, 1.0 there.

    Returns:
        advantages_M: (M,), dtype of the rewards.
        used_N: bool (N,), False where no turn of the whole group carries signal.

    Raises:
        UserError: a reward or a return is not finite.
        ValueError: unknown estimator.
    """
    _check_finite(returns_M, "return")
    rewards = rewards_N.double()
    episode_N, used_N = group_advantages(rewards, group_ids_N, estimator=estimator, epsilon=epsilon)
    _, group_N = torch.unique(group_ids_N, return_inverse=True)
    group_M = group_N[trajectory_M]
    _, state_M = torch.unique(torch.stack([group_M, anchors_M]), dim=1, return_inverse=True)
    step_M, equal_M, _ = _relative_to_segment(returns_M.double(), state_M, estimator, epsilon)
    advantages_M = episode_N[trajectory_M] + weight * step_M
    if weight != 0:
        used_N = used_N | torch.isin(group_N, group_M[~equal_M])
    return advantages_M.to(rewards_N.dtype), used_N


def discounted_returns(rewards_M: Tensor, trajectory_M: Tensor, discount: float) -> Tensor:
    """Return of each turn: its reward plus `discount` times the return of the same trajectory's next turn.

    Equation 5 of GiGPO (0.95 there). The turns of a trajectory come in the order in which they were played;
    different trajectories may interleave.

    Args:
        rewards_M: float (M,), the reward given after each turn.
        trajectory_M: int64 (M,), the trajectory that a turn belongs to.

    Returns:
        (M,), dtype of the rewards.
    """
    later: dict[int, float] = {}
    returns = []
    for reward, trajectory in zip(reversed(rewards_M.tolist()), reversed(trajectory_M.tolist()), strict=True):
        later[trajectory] = reward + discount * later.get(trajectory, 0.0)
        returns.append(later[trajectory])
    return torch.tensor(returns[::-1], dtype=rewards_M.dtype, device=rewards_M.device)


def _relative_to_segment(
    values: Tensor, segment: Tensor, estimator: Estimator, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Centre values within their segment (0 .. S-1): relative values, is the segment all equal, its size."""
    if estimator not in ("grpo", "grpo_no_std"):
        raise ValueError(f"unknown advantage estimator {estimator!r}: expected 'grpo' or 'grpo_no_std'")
    size_S = torch.bincount(segment)
    zeros_S = values.new_zeros(len(size_S))
    lowest_S = zeros_S.scatter_reduce(0, segment, values, "amin", include_self=False)
    highest_S = zeros_S.scatter_reduce(0, segment, values, "amax", include_self=False)
    equal = (lowest_S == highest_S)[segment]
    mean_S = zeros_S.index_add(0, segment, values) / size_S
    relative = values - mean_S[segment]
    if estimator == "grpo":
        variance_S = zeros_S.index_add(0, segment, relative.square()) / (size_S - 1).clamp(min=1)
        relative = relative / (variance_S.sqrt() + epsilon)[segment]
    # Exactly 0, not the rounding of the mean that a tiny std has blown up.
    return torch.where(equal, 0.0, relative), equal, size_S[segment]


def _check_finite(values: Tensor, what: str) -> None:
    bad = torch.nonzero(~torch.isfinite(values)).flatten().tolist()
    if bad:
        raise UserError(
            f"{what} number {bad[0]} is {values[bad[0]].item()}: "
            "the environment must give finite rewards (see ImageEnv.step)"
        )
