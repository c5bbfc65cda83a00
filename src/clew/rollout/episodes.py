"""Plays episodes: many environments in lockstep, one engine, one token ledger an episode."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from clew.agent.ledger import StopReason, Trajectory, Turn
from clew.agent.template import ChatTemplate
from clew.envs.base import ImageEnv, Observation, Task
from clew.errors import UserError
from clew.policy.vision import FramePatcher
from clew.rollout.engine import Completion, Engine, Sampling, derive_seed

log = logging.getLogger(__name__)

MakeEnv = Callable[[], ImageEnv]
FrameFilter = Callable[[np.ndarray, Trajectory], np.ndarray]


@dataclass(frozen=True)
class Player:
    """What turns observations into tokens: the model folder's template and image processor."""

    template: ChatTemplate
    patcher: FramePatcher


@dataclass(frozen=True)
class Limits:
    """Token and time budgets.

    Attributes:
        max_tokens: of a whole trajectory, prompt and images included.
        deadline_s: seconds a batch of episodes may take; what has not ended by then is an infrastructure stop.
    """

    max_tokens: int
    deadline_s: float = float("inf")


class _Episode:
    """One attempt in progress: an environment and the trajectory it writes."""

    def __init__(self, player: Player, make_env: MakeEnv, task: Task, sample: int, see: FrameFilter | None) -> None:
        self.player, self.make_env, self.task, self.sample, self.see = player, make_env, task, sample, see
        self.replayed = False
        self.env: ImageEnv | None = None
        self.open()

    def open(self) -> None:
        """Starts (again) with a fresh environment and an empty ledger."""
        self.trajectory = Trajectory(self.task, self.sample)
        try:
            self.env = self.make_env()
            observation, info = self.env.reset(self.task.seed)
        except UserError:  # the recipe's fault: a second try would not help
            raise
        except Exception:
            self._crashed("reset")
            return
        if info["content_hash"] != self.task.content_hash:
            raise ValueError(
                f"{self.task.env_id} seed {self.task.seed} made content {info['content_hash']}, "
                f"the task says {self.task.content_hash}: its settings differ from those of the task list"
            )
        self.trajectory.path_length = info.get("path_length")
        self._show(observation, opening=True)

    @property
    def living(self) -> bool:
        return self.trajectory.stop_reason is None

    def _show(self, observation: Observation, *, opening: bool = False) -> None:
        frame = self.see(observation.image, self.trajectory) if self.see else observation.image
        grid = self.player.patcher.grid(frame)
        count = grid[0] * grid[1] * grid[2] // self.player.patcher.merge**2
        template = self.player.template
        if opening:
            assert self.env is not None
            ids = template.opening(self.env.prompt, observation.text, count)
        else:
            ids = template.continuation(observation.text, count, ended=True)  # a cut answer ends the episode
        # Text, image and grid are committed together or not at all.
        self.trajectory.append_prompt(ids, grid)
        self.trajectory.turns.append(Turn(observation.text, frame))

    def fits(self, limits: Limits, sampling: Sampling) -> bool:
        return len(self.trajectory.token_ids) + sampling.max_new_tokens <= limits.max_tokens

    def answer(self, completion: Completion) -> None:
        """Records an answer, plays it, and shows what comes of it."""
        assert self.env is not None
        trajectory, turn = self.trajectory, self.trajectory.turns[-1]
        turn.start = len(trajectory.token_ids)
        trajectory.append_sampled(completion.ids, completion.logprobs)
        turn.end = len(trajectory.token_ids)
        text_ids = completion.ids[:-1] if completion.ended else completion.ids
        turn.answer = self.player.template.tokenizer.decode(text_ids)
        if not completion.ended:
            self.stop(StopReason.TURN_TOKENS)
            return
        try:
            observation, reward, terminated, truncated, info = self.env.step(turn.answer)
        except Exception:
            self._crashed("step")
            return
        turn.reward, turn.feedback = reward, info.get("feedback", "")
        trajectory.reward += reward
        if terminated or truncated:
            trajectory.success = bool(info.get("success"))
            trajectory.final_frame = observation.image
            if trajectory.success:
                self.stop(StopReason.SUCCESS)
            else:
                self.stop(StopReason.WRONG_END if terminated else StopReason.TURN_CAP)
        else:
            self._show(observation)

    def _crashed(self, during: str) -> None:
        """An environment's exception is infrastructure: once it is replaced and the episode played again."""
        log.warning("%s seed %d raised in %s", self.task.env_id, self.task.seed, during, exc_info=True)
        self.close()
        if self.replayed:
            self.stop(StopReason.ENV_CRASHED)
        else:
            self.replayed = True
            self.open()

    def stop(self, reason: StopReason) -> None:
        """Ends the episode."""
        self.trajectory.stop_reason = reason

    def close(self) -> None:
        """Closes the environment, if one is open; one that fails at that harms no other episode."""
        env, self.env = self.env, None
        if env is not None:
            try:
                env.close()
            except Exception:
                log.warning("%s seed %d raised in close", self.task.env_id, self.task.seed, exc_info=True)


def play(
    engine: Engine,
    player: Player,
    make_env: MakeEnv,
    attempts: Sequence[tuple[Task, int]],
    sampling: Sampling,
    limits: Limits,
    seed_parts: tuple[int | str, ...],
    see: FrameFilter | None = None,
) -> list[Trajectory]:
    """Plays one episode for each (task, sample) and returns their trajectories in that order.

    Every draw derives from ``seed_parts``, the task, the sample and the turn, so an episode does not depend on
    which others are played beside it (up to the last bits of batched arithmetic).

    Args:
        see: replaces a frame before the agent sees it (for the sight test).
    """
    began = time.monotonic()
    episodes = [_Episode(player, make_env, task, sample, see) for task, sample in attempts]
    living = [e for e in episodes if e.living]
    while living:
        late = time.monotonic() - began > limits.deadline_s
        for episode in living:
            if late:
                episode.stop(StopReason.DEADLINE)
            elif not episode.fits(limits, sampling):
                episode.stop(StopReason.TRAJECTORY_TOKENS)
        living = [e for e in living if e.living]
        if not living:
            break
        seeds = [derive_seed(*seed_parts, e.task.content_hash, e.sample, len(e.trajectory.turns)) for e in living]
        for episode, completion in zip(
            living, engine.sample([e.trajectory for e in living], sampling, seeds), strict=True
        ):
            episode.answer(completion)
        living = [e for e in living if e.living]
    for episode in episodes:
        episode.trajectory.policy_version = engine.version
        episode.close()
    return [e.trajectory for e in episodes]
