"""Demonstrations for imitation: conversations in which a navigator plays an environment."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from clew.envs.base import ImageEnv, Observation
from clew.envs.navigators import Navigator, Walk, fallible, oracle
from clew.envs.suites import belongs_to_imitation
from clew.errors import UserError
from clew.policy.model import VisionLanguageModel

_TRIES = 1000  # in a row, for one demonstration: then there is none to be had


@dataclass(frozen=True)
class Demonstration:
    """A conversation to imitate.

    Attributes:
        token_ids: prompt, observations and answers.
        answered: for each token, whether it belongs to an answer (only those carry loss).
        grids: (t, h, w) patches of each frame.
        frames: uint8 RGB frames in order.
    """

    token_ids: list[int]
    answered: list[bool]
    grids: list[tuple[int, int, int]]
    frames: list[np.ndarray]


class Demonstrator:
    """Draws demonstrations from tasks that may be imitated and are not held out."""

    def __init__(self, vlm: VisionLanguageModel, env: ImageEnv, held_out: frozenset[str]) -> None:
        self.vlm, self.env, self.held_out = vlm, env, held_out

    def window(self, rng: random.Random, turns: int, farthest: int) -> Demonstration:
        """Perfect play for a few turns, from a random place at most ``farthest`` moves from the goal.

        Whole demonstrations of perfect play never see a dead end; random places do. Where nobody walks, perfect play
        from the start is all there is to show.
        """
        for _ in range(_TRIES):
            observation, info = self.env.reset(rng.getrandbits(40))
            if isinstance(self.env, Walk):
                observation, info = self.env.start_within(farthest, rng)
            if self._allowed(info["content_hash"]):
                return self._record(observation, oracle, rng, turns)[0]
        raise UserError(
            f"environment.id: {_TRIES:,} tasks of {self.env.env_id} in a row are held out or left to reinforcement "
            "learning, so none is left to imitate; make evaluation.size smaller, or take a larger environment"
        )

    def episode(self, rng: random.Random, random_moves: float) -> Demonstration:
        """A whole successful episode of a navigator that errs in ``random_moves`` of its turns."""
        navigate = fallible(random_moves)
        for _ in range(_TRIES):
            observation, info = self.env.reset(rng.getrandbits(40))
            if self._allowed(info["content_hash"]):
                demonstration, success = self._record(observation, navigate, rng, self.env.max_turns)
                if success:
                    return demonstration
        raise UserError(
            f"sft.random_moves = {random_moves}: no demonstration of {self.env.env_id} in {_TRIES:,} succeeded within "
            f"sft.episode_turns = {self.env.max_turns}; lower random_moves, raise episode_turns, or look at what wins"
        )

    def _allowed(self, content_hash: str) -> bool:
        return belongs_to_imitation(content_hash) and content_hash not in self.held_out

    def _record(
        self, observation: Observation, navigate: Navigator, rng: random.Random, turns: int
    ) -> tuple[Demonstration, bool]:
        template, patcher = self.vlm.template, self.vlm.patcher
        ids: list[int] = []
        answered: list[bool] = []
        grids: list[tuple[int, int, int]] = []
        frames: list[np.ndarray] = []
        success = False
        for turn in range(turns):
            frame, text = observation.image, observation.text
            grid = patcher.grid(frame)
            count = grid[0] * grid[1] * grid[2] // patcher.merge**2
            if turn == 0:
                prompt = template.opening(self.env.prompt, text, count)
            else:
                prompt = template.continuation(text, count, ended=True)
            answer = navigate(self.env, rng)
            answer_ids = [
                *template.tokenizer(answer, add_special_tokens=False)["input_ids"],
                template.end_of_turn_id,
            ]
            ids += prompt + answer_ids
            answered += [False] * len(prompt) + [True] * len(answer_ids)
            grids.append(grid)
            frames.append(frame)
            observation, _, terminated, truncated, info = self.env.step(answer)
            success = info["success"]
            if terminated or truncated:
                break
        return Demonstration(ids, answered, grids, frames), success
