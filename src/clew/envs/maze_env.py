"""``clew/Maze-v0``: walk from the blue disc to the red square, one move a turn."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Collection
from typing import Any, Literal

import numpy as np

from clew.envs.base import Observation, Task
from clew.envs.maze import DIRECTIONS, PALETTES, Maze, best_directions, distances, draw, make_maze

ENV_ID = "clew/Maze-v0"
ACTIONS = (*DIRECTIONS, "stop")
_ANSWER = re.compile(r"<action>([^<]*)</action>")

PROMPTS = {
    "reach": (
        "You are the blue disc in a maze. Walk to the red square. "
        "Answer each frame with one move: <action>up|down|left|right|stop</action>"
    ),
    "stop": (
        "You are the blue disc in a maze. Walk to the red square and stop on it. "
        "Answer each frame with one move: <action>up|down|left|right|stop</action>"
    ),
}
FEEDBACK = {
    "moved": "Moved.",
    "blocked": "Blocked by a wall.",
    "unparsable": "Not understood.",
    "reached": "You reached the goal.",
    "stopped": "You stopped.",
    "idle": "Nothing happened.",
}


def answer_text(action: str) -> str:
    """How an action is written."""
    return f"<action>{action}</action>"


def parse_action(answer: str, names: Collection[str] = ACTIONS) -> str | None:
    """The action that an answer names, or None where it names none, several, or one that is not in ``names``."""
    found = _ANSWER.findall(answer)
    name = found[0].strip() if len(found) == 1 else None
    return name if name in names else None


class MazeEnv:
    """A maze seen as an image and walked by text (see ``ImageEnv``).

    Args:
        size: (rows, cols) of the lattice.
        min_path, max_path: bounds of the shortest path, in moves.
        max_turns: turns after which the episode is truncated.
        goal: ``"reach"`` - entering the goal succeeds and ends the episode;
            ``"stop"`` - only stopping on it does.
        braid: share of dead ends that are opened.
        palette: colours, a key of ``PALETTES``.

    Raises:
        ValueError: a setting is out of range, or some task could not be solved within ``max_turns``.
    """

    env_id = ENV_ID
    action_names: tuple[str, ...] = ACTIONS

    def __init__(
        self,
        size: tuple[int, int] = (6, 6),
        min_path: int = 6,
        max_path: int = 12,
        max_turns: int = 15,
        goal: Literal["reach", "stop"] = "reach",
        braid: float = 0.0,
        palette: str = "day",
    ) -> None:
        if palette not in PALETTES:
            raise ValueError(f"palette {palette!r} is unknown; there are {', '.join(PALETTES)}")
        if goal not in PROMPTS:
            raise ValueError(f"goal {goal!r} is unknown; there are {', '.join(PROMPTS)}")
        if len(size) != 2 or not all(2 <= side <= 255 for side in size):
            raise ValueError(f"size {size} is impossible; give rows and columns, each from 2 to 255")
        if not 1 <= min_path <= max_path or min_path >= size[0] * size[1] or not 0 <= braid <= 1:
            raise ValueError(f"no maze has size {size}, paths {min_path} to {max_path} and braid {braid}")
        if max_path + (goal == "stop") > max_turns:
            raise ValueError(
                f"paths of up to {max_path} moves can't be walked within {max_turns} turns (goal {goal!r})"
            )
        self.size, self.min_path, self.max_path = (int(size[0]), int(size[1])), min_path, max_path
        self.max_turns, self.goal, self.braid, self.palette = max_turns, goal, braid, palette
        self.prompt = PROMPTS[goal]
        self.maze: Maze | None = None
        self.turn = 0

    def make(self, seed: int) -> Maze:
        """The maze of a seed under this environment's settings."""
        return make_maze(seed, *self.size, self.min_path, self.max_path, self.braid)

    def task(self, seed: int) -> Task:
        """The task of a seed."""
        return Task(ENV_ID, seed, self.make(seed).content_hash)

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Starts the maze of ``seed``."""
        return self.start(self.make(seed))

    def start(self, maze: Maze) -> tuple[Observation, dict[str, Any]]:
        """Starts a given maze."""
        self.maze = maze
        self.room = maze.start
        self.turn = 0
        self.over = False
        self._distance_to_goal: list[int] | None = None
        info = {"content_hash": maze.content_hash, "path_length": maze.path_length}
        return Observation(self.frame(), ""), info

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Plays one answer; reward 1.0 only on success.

        Raises:
            RuntimeError: the episode has ended or was never started.
        """
        maze = self._started()
        if self.over:
            raise RuntimeError("the episode is over: call reset(seed) first")
        self.turn += 1
        name = parse_action(action)
        success = terminated = False
        if name is None:
            feedback = "unparsable"
        elif name == "stop":
            # Under "reach" there is nothing to stop for: the goal ends the episode by itself.
            terminated = self.goal == "stop"
            success = terminated and self.room == maze.goal
            feedback = "reached" if success else "stopped" if terminated else "idle"
        else:
            other = maze.neighbour(self.room, DIRECTIONS.index(name))
            feedback = "blocked" if other is None else "moved"
            if other is not None:
                self.room = other
                if self.goal == "reach" and other == maze.goal:
                    success = terminated = True
                    feedback = "reached"
        truncated = not terminated and self.turn >= self.max_turns
        self.over = terminated or truncated
        info = {"success": success, "feedback": feedback, "action": name}
        return Observation(self.frame(), FEEDBACK[feedback]), float(success), terminated, truncated, info

    def frame(self) -> np.ndarray:
        """The current frame, uint8 RGB [height, width, 3]."""
        return draw(self._started(), self.room, self.palette)

    def distance_to_goal(self) -> list[int]:
        """Moves from each room to the goal."""
        maze = self._started()
        if self._distance_to_goal is None:
            self._distance_to_goal = distances(maze.rows, maze.cols, maze.open_sides, maze.goal)
        return self._distance_to_goal

    def exits(self) -> list[int]:
        """The open directions, as indices into ``DIRECTIONS``."""
        return self._started().exits(self.room)

    def best_moves(self) -> list[int]:
        """The directions that lead nearer to the goal; none on it."""
        maze = self._started()
        return [] if self.room == maze.goal else best_directions(maze, self.distance_to_goal(), self.room)

    def oracle_action(self) -> str:
        """The text of an optimal action from here (the first of them in the order up, right, down, left)."""
        moves = self.best_moves()
        return self.move_text(moves[0]) if moves else self.stop_text

    def move_text(self, direction: int) -> str:
        """How a move is written."""
        return answer_text(DIRECTIONS[direction])

    stop_text = answer_text("stop")
    """How stopping is written."""

    def start_within(self, farthest: int, rng: random.Random) -> tuple[Observation, dict[str, Any]]:
        """Starts the current maze again from a random room at most ``farthest`` moves from the goal."""
        maze = self._started()
        distance = distances(*self.size, maze.open_sides, maze.goal)
        rooms = [room for room, moves in enumerate(distance) if 1 <= moves <= farthest]
        start = rng.choice(rooms)
        return self.start(dataclasses.replace(maze, start=start, path_length=distance[start]))

    def _started(self) -> Maze:
        if self.maze is None:
            raise RuntimeError("no episode was started: call reset(seed) first")
        return self.maze

    def close(self) -> None:
        """Nothing is held open."""
