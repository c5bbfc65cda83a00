"""The trajectory: an episode's append-only record of tokens."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from clew.envs.base import Task


class StopReason(enum.StrEnum):
    """Why an episode ended."""

    SUCCESS = "success"
    """The goal was reached within the cap."""
    WRONG_END = "wrong_end"
    """The environment ended the episode without success (for example: stop beside the goal)."""
    TURN_CAP = "turn_cap"
    """All turns were used without reaching the goal."""
    TURN_TOKENS = "turn_tokens"
    """An answer used up its token budget before it ended its turn: it was cut, not misread."""
    TRAJECTORY_TOKENS = "trajectory_tokens"
    """The trajectory's token budget has no room for another turn."""
    DEADLINE = "deadline"
    """Infrastructure: the episode did not end in time."""
    ENV_CRASHED = "env_crashed"
    """Infrastructure: the environment raised an exception, again after it was replaced."""
    ENGINE_LOST = "engine_lost"
    """Infrastructure: the engine died, again after the episode was played elsewhere."""

    @property
    def infrastructure(self) -> bool:
        """True when the agent is not to blame: such episodes are left out of the statistics."""
        return self in (StopReason.DEADLINE, StopReason.ENV_CRASHED, StopReason.ENGINE_LOST)


@dataclass
class Turn:
    """One exchange: what was shown, what was answered, what came of it.

    ``start``/``end`` delimit the sampled answer in the trajectory's token ids, where those are known.
    """

    text: str
    frame: np.ndarray
    start: int = 0
    end: int = 0
    answer: str = ""
    answered: bool = False  # whether it was the agent's turn; its answer may be empty, or cut
    feedback: str = ""
    action: str | None = None  # what the environment understood, where it says so
    reward: float = 0.0


@dataclass
class Trajectory:
    """Append-only token record of one episode.

    Attributes:
        task: the task; its ``content_hash`` keys the group.
        sample: which attempt at the task this is (0 .. group_size - 1).
        token_ids: prompt, observation and answer tokens in order; image placeholders expanded.
        sampled: for each token, whether the policy sampled it (only those carry loss).
        logprobs: for each token the log-probability it was sampled with, in nats (0.0 where not sampled).
        grids: (t, h, w) patches of each image, in order of appearance.
        turns: the exchanges, with their frames.
        policy_version: name of the adapter that sampled the tokens.
        prompt: the environment's instructions, which the first observation is shown with.

    An endpoint that is reached as text gives no token ids: there is no token record then (``token_ids``, ``sampled``,
    ``logprobs`` and ``grids`` stay empty), and nothing to train on.
    """

    task: Task
    sample: int
    path_length: int | None = None
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    final_frame: np.ndarray | None = None
    stop_reason: StopReason | None = None
    reward: float = 0.0
    success: bool = False
    policy_version: str = ""
    prompt: str = ""

    @property
    def frames(self) -> list[np.ndarray]:
        """The frames shown so far, uint8 RGB [height, width, 3]."""
        return [turn.frame for turn in self.turns]

    def append_prompt(self, ids: list[int], grid: tuple[int, int, int] | None = None) -> None:
        """Appends tokens that the policy did not sample, with the grid of the image they hold."""
        self.token_ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        if grid is not None:
            self.grids.append(grid)

    def append_sampled(self, ids: list[int], logprobs: list[float]) -> None:
        """Appends an answer exactly as it was sampled."""
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled tokens came with {len(logprobs)} log-probabilities")
        self.token_ids += ids
        self.sampled += [True] * len(ids)
        self.logprobs += logprobs

    def check_images(self, image_token_id: int, merge_size: int) -> None:
        """Asserts that the placeholders are as many as the grids say (truth 2).

        Raises:
            ValueError: they differ, or an image token was sampled.
        """
        placeholders = self.token_ids.count(image_token_id)
        promised = sum(t * h * w for t, h, w in self.grids) // merge_size**2
        if placeholders != promised:
            raise ValueError(f"{placeholders} image placeholders stand for {promised} visual tokens (task {self.task})")
        if any(s and t == image_token_id for s, t in zip(self.sampled, self.token_ids, strict=True)):
            raise ValueError(f"an image placeholder was sampled (task {self.task})")
