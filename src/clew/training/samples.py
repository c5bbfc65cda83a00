"""From a step's trajectories to samples with advantages, and what the step's episodes looked like."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import torch

from clew.agent.ledger import StopReason, Trajectory
from clew.algorithms import discounted_returns, group_advantages, step_advantages
from clew.recipe import AlgorithmTable
from clew.training.update import Sample

GIGPO_DISCOUNT = 0.95  # arXiv 2505.10978, section 5.1


def prepare(trajectories: Sequence[Trajectory], algorithm: AlgorithmTable) -> tuple[list[Sample], list[bool]]:
    """Advantages relative to each task's group; infrastructure failures are left out.

    Returns:
        The samples, and for each whether its group carries signal (equal rewards do not).
    """
    counted = [t for t in trajectories if t.stop_reason and not t.stop_reason.infrastructure and t.turns]
    if not counted:
        return [], []
    groups: dict[str, int] = {}
    group_ids_N = torch.tensor([groups.setdefault(t.task.content_hash, len(groups)) for t in counted])
    rewards_N = torch.tensor([t.reward for t in counted], dtype=torch.float64)
    if algorithm.advantage == "gigpo":
        turns = [(n, turn) for n, t in enumerate(counted) for turn in t.turns]
        trajectory_M = torch.tensor([n for n, _ in turns])
        turn_rewards_M = torch.tensor([turn.reward for _, turn in turns], dtype=torch.float64)
        advantages_M, used_N = step_advantages(
            rewards_N,
            group_ids_N,
            discounted_returns(turn_rewards_M, trajectory_M, GIGPO_DISCOUNT),
            trajectory_M,
            torch.tensor([_anchor(turn.frame.tobytes()) for _, turn in turns]),
            weight=algorithm.step_advantage_weight,
            epsilon=algorithm.epsilon,
        )
        flat = iter(advantages_M.tolist())
        per_turn = [[next(flat) for _ in t.turns] for t in counted]
    else:
        advantages_N, used_N = group_advantages(
            rewards_N, group_ids_N, estimator=algorithm.advantage, epsilon=algorithm.epsilon
        )
        per_turn = [[a] * len(t.turns) for t, a in zip(counted, advantages_N.tolist(), strict=True)]
    samples = [Sample(t, advantages) for t, advantages in zip(counted, per_turn, strict=True)]
    return samples, used_N.tolist()


def _anchor(frame: bytes) -> int:
    """What the agent saw is the state it acted in: a key that any image environment has."""
    return int.from_bytes(hashlib.blake2b(frame, digest_size=7).digest(), "little")


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Counts and means over all trajectories of a step (see docs/run-directory.md)."""
    counted = [t for t in trajectories if t.stop_reason and not t.stop_reason.infrastructure]
    answers = [t.token_ids[turn.start : turn.end] for t in counted for turn in t.turns if turn.end > turn.start]
    reasons = Counter(t.stop_reason for t in trajectories)
    cut = reasons[StopReason.TURN_TOKENS] + reasons[StopReason.TRAJECTORY_TOKENS]
    solved = sum(t.success for t in counted)
    return {
        "train/solve_rate": solved / max(len(counted), 1),
        "train/solved": solved,
        "train/episodes": len(counted),
        "train/reward_mean": fmean([t.reward for t in counted] or [0.0]),
        "rollout/turns_mean": fmean([len(t.turns) for t in counted] or [0.0]),
        "rollout/tokens_sampled": sum(sum(t.sampled) for t in trajectories),
        "rollout/tokens_total": sum(len(t.token_ids) for t in trajectories),
        "rollout/answer_tokens_mean": fmean([len(a) for a in answers] or [0.0]),
        "rollout/cut_ratio": cut / max(len(counted), 1),
        "rollout/repetition": repetition(answers),
        **{f"rollout/stop/{reason}": reasons[reason] for reason in StopReason},
    }


def repetition(answers: Sequence[Sequence[int]]) -> float:
    """Share of answer tokens that repeat the token before them: near 1 when output has collapsed."""
    pairs = sum(max(len(a) - 1, 0) for a in answers)
    return sum(x == y for a in answers for x, y in pairwise(a)) / max(pairs, 1)


def group_metrics(samples: Sequence[Sample], used: Sequence[bool]) -> dict[str, float]:
    """Groups with and without signal, and the advantages of the former."""
    by_group = {s.trajectory.task.content_hash: u for s, u in zip(samples, used, strict=True)}
    values = torch.tensor(
        [a for s, u in zip(samples, used, strict=True) if u for a in s.advantages] or [0.0],
        dtype=torch.float64,
    )
    return {
        "train/groups_used": sum(by_group.values()),
        "train/groups_equal": len(by_group) - sum(by_group.values()),
        "advantages/mean": float(values.mean()),
        "advantages/std": float(values.std(correction=0)),
        "advantages/max": float(values.abs().max()),
    }


def warnings_for(metrics: dict[str, float]) -> list[str]:
    """What a user should look at now: collapse, and answers that are nearly all cut."""
    found = []
    if metrics.get("train/episodes") == 0:
        found.append(
            "no episode counts: each was ended by the deadline or by a crash of its environment: "
            "raise rollout.deadline_s, or mend the environment"
        )
    if metrics["rollout/cut_ratio"] > 0.9:
        found.append(
            f"{metrics['rollout/cut_ratio']:.0%} of the episodes were cut by a token cap and earn nothing: "
            "raise rollout.max_new_tokens or rollout.max_tokens"
        )
    if metrics.get("train/updates") and metrics["policy/entropy"] < 1e-3 and metrics["train/solve_rate"] < 0.5:
        found.append(
            f"the policy's entropy has collapsed to {metrics['policy/entropy']:.1e} nats while it solves "
            f"{metrics['train/solve_rate']:.0%}: lower training.learning_rate or set algorithm.kl_coef"
        )
    if metrics["rollout/repetition"] > 0.5:
        found.append(
            f"{metrics['rollout/repetition']:.0%} of the answers' tokens repeat the one before: the output has "
            "collapsed; start again from an earlier checkpoint with a lower training.learning_rate"
        )
    return found
