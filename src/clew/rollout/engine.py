"""What samples tokens: the protocol every engine keeps, and the randomness it uses."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clew.agent.ledger import Trajectory


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn.

    Attributes:
        temperature: divides the logits; 0 means greedy (log-probabilities are then those at temperature 1).
        max_new_tokens: budget of one answer, its end of turn included.
    """

    temperature: float
    max_new_tokens: int


@dataclass(frozen=True)
class Completion:
    """One sampled answer.

    Attributes:
        ids: the sampled tokens, the end of turn included when it was sampled.
        logprobs: their log-probabilities in nats.
        ended: whether the end of turn was sampled (otherwise the answer was cut).
    """

    ids: list[int]
    logprobs: list[float]
    ended: bool


class Engine(Protocol):
    """Samples the next answer of several trajectories under one policy version."""

    version: str

    def sample(self, trajectories: list[Trajectory], sampling: Sampling, seeds: list[int]) -> list[Completion]:
        """Answers each trajectory once; ``seeds`` (one a trajectory) fix all its draws.

        The engine may keep state for the trajectories of the last call; those that are not in the next call are
        forgotten, and one it does not know is computed from its beginning.
        """
        ...

    def release(self) -> None:
        """Forgets all trajectories and every cached feature."""
        ...


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed from a run's coordinates: (seed, step, task, sample, turn), independent of any stream."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(seeds: np.ndarray, index: int) -> np.ndarray:
    """For each seed, the ``index``-th number of its counter-based stream: float64 in [0, 1), shape [n].

    SplitMix64's output function (Steele, Lea and Flood 2014) of seed + (index + 1) * golden ratio.
    """
    with np.errstate(over="ignore"):
        z = seeds.astype(np.uint64) + np.uint64(index + 1) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
