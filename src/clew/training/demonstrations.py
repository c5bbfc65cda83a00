"""Demonstrations for imitation: conversations in which a navigator walks a maze."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import numpy as np

from clew.envs.maze import distances
from clew.envs.maze_env import MazeEnv, parse_action
from clew.envs.navigators import Navigator, fallible, oracle
from clew.envs.suites import belongs_to_imitation
from clew.policy.model import VisionLanguageModel


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
    """Draws demonstrations from mazes that may be imitated and are not held out."""

    def __init__(self, vlm: VisionLanguageModel, env: MazeEnv, held_out: frozenset[str]) -> None:
        self.vlm, self.env, self.held_out = vlm, env, held_out

    def window(self, rng: random.Random, turns: int, farthest: int) -> Demonstration:
        """Perfect play for a few turns, from a random room at most ``farthest`` moves from the goal.

        Whole demonstrations of perfect play never see a dead end; random rooms do.
        """
        while True:
            maze = self.env.make(rng.getrandbits(40))
            distance = distances(*self.env.size, maze.open_sides, maze.goal)
            rooms = [room for room, moves in enumerate(distance) if 1 <= moves <= farthest]
            start = rng.choice(rooms)
            maze = dataclasses.replace(maze, start=start, path_length=distance[start])
            if self._allowed(maze.content_hash):
                self.env.start(maze)
                return self._record(oracle, rng, turns)[0]

    def episode(self, rng: random.Random, random_moves: float) -> Demonstration:
        """A whole successful episode of a navigator that errs in ``random_moves`` of its turns."""
        navigate = fallible(random_moves)
        while True:
            maze = self.env.make(rng.getrandbits(40))
            if self._allowed(maze.content_hash):
                self.env.start(maze)
                demonstration, success = self._record(navigate, rng, self.env.max_turns)
                if success:
                    return demonstration

    def _allowed(self, content_hash: str) -> bool:
        return belongs_to_imitation(content_hash) and content_hash not in self.held_out

    def _record(self, navigate: Navigator, rng: random.Random, turns: int) -> tuple[Demonstration, bool]:
        template, patcher = self.vlm.template, self.vlm.patcher
        ids: list[int] = []
        answered: list[bool] = []
        grids: list[tuple[int, int, int]] = []
        frames: list[np.ndarray] = []
        text, success = "", False
        for turn in range(turns):
            frame = self.env.frame()
            grid = patcher.grid(frame)
            count = grid[0] * grid[1] * grid[2] // patcher.merge**2
            if turn == 0:
                prompt = template.opening(self.env.prompt, text, count)
            else:
                prompt = template.continuation(text, count, ended=True)
            answer = navigate(self.env, rng)
            assert parse_action(answer) is not None
            answer_ids = [
                *template.tokenizer(answer, add_special_tokens=False)["input_ids"],
                template.end_of_turn_id,
            ]
            ids += prompt + answer_ids
            answered += [False] * len(prompt) + [True] * len(answer_ids)
            grids.append(grid)
            frames.append(frame)
            observation, _, terminated, truncated, info = self.env.step(answer)
            text, success = observation.text, info["success"]
            if terminated or truncated:
                break
        return Demonstration(ids, answered, grids, frames), success
