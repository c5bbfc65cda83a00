"""What samples tokens: the protocol every engine keeps, and the randomness it uses."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from clew.agent.ledger import StopReason, Trajectory


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
        text: the answer in words, from an engine that gives no ids.
        stop: why the episode ends here, from an engine that has no answer to give.
    """

    ids: list[int]
    logprobs: list[float]
    ended: bool
    text: str = ""
    stop: StopReason | None = None


class Engine(Protocol):
    """Samples answers of several trajectories under one policy version.

    Requests are handed in one by one and answers come when they are ready: an engine with continuous batching returns
    each as it ends, one that works in lockstep returns all of a round together.

    Attributes:
        version: name of the adapter that samples, ``base`` without one.
        patience_s: how long the other episodes wait for one whose environment is slow, in seconds.
    """

    version: str
    patience_s: float

    def submit(self, trajectory: Trajectory, sampling: Sampling, seed: int) -> None:
        """Asks for the next answer of a trajectory; ``seed`` fixes all its draws.

        The engine may keep state (a cache) for a trajectory from one request to the next.
        """
        ...

    def collect(self) -> list[tuple[Trajectory, Completion]]:
        """Waits until answers are ready, at least one of the requests, and returns them."""
        ...

    def abandon(self, trajectory: Trajectory) -> None:
        """Forgets a trajectory; a request of it that is still running is dropped."""
        ...

    def release(self) -> None:
        """Forgets all trajectories and every cached feature."""
        ...

    def sleep(self) -> None:
        """Gives up device memory that a colocated trainer could use, as far as the engine can."""
        ...

    def wake(self) -> None:
        """Takes it back."""
        ...


class LockstepEngine:
    """``submit`` and ``collect`` on top of a ``sample`` that answers a whole batch at once."""

    patience_s = 10.0  # an episode that misses a round is computed from its beginning in the next

    def __init__(self) -> None:
        self._asked: list[tuple[Trajectory, Sampling, int]] = []

    def sample(self, trajectories: list[Trajectory], sampling: Sampling, seeds: list[int]) -> list[Completion]:
        """Answers each trajectory once; ``seeds`` (one a trajectory) fix all its draws.

        State may be kept for the trajectories of the last call; those that are not in the next call are forgotten,
        and one that is not known is computed from its beginning.
        """
        raise NotImplementedError

    def submit(self, trajectory: Trajectory, sampling: Sampling, seed: int) -> None:
        """See ``Engine.submit``."""
        self._asked.append((trajectory, sampling, seed))

    def collect(self) -> list[tuple[Trajectory, Completion]]:
        """See ``Engine.collect``: one batch of everything that was asked (all with one sampling)."""
        asked, self._asked = self._asked, []
        trajectories = [trajectory for trajectory, _, _ in asked]
        (sampling,) = {sampling for _, sampling, _ in asked}
        return list(zip(trajectories, self.sample(trajectories, sampling, [s for *_, s in asked]), strict=True))

    def abandon(self, trajectory: Trajectory) -> None:
        """See ``Engine.abandon``: what is not asked for again is forgotten anyway."""
        self._asked = [request for request in self._asked if request[0] is not trajectory]

    def sleep(self) -> None:
        """See ``Engine.sleep``: nothing is given up."""

    def wake(self) -> None:
        """See ``Engine.wake``."""


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
