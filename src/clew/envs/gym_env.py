"""The Gymnasium face of the maze: ``gymnasium.make("clew/Maze-v0")``, once ``clew.envs`` is imported."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import register
from gymnasium.error import InvalidAction

from clew.envs.base import Observation
from clew.envs.maze import draw
from clew.envs.maze_env import ACTIONS, ENV_ID, MazeEnv, answer_text


class MazeGymEnv(gymnasium.Env[np.ndarray, np.int64]):
    """The maze for agents that choose a number instead of writing an answer.

    Observations are the frames of ``MazeEnv`` (uint8 RGB [rows * 16, cols * 16, 3]); action i is
    ``ACTIONS[i]`` (up, right, down, left, stop). ``info`` holds what ``MazeEnv`` says, and its feedback
    sentence as ``text``.

    Args:
        render_mode: ``"rgb_array"``, or None to draw nothing on ``render()``.
        settings: keyword arguments of ``MazeEnv``.

    Raises:
        ValueError: a setting is out of range.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 4}  # type: ignore[misc]

    def __init__(self, render_mode: str | None = None, **settings: Any) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode {render_mode!r} is unknown; there is rgb_array")
        self.render_mode = render_mode
        self.maze_env = MazeEnv(**settings)
        frame = draw(self.maze_env.make(0), 0)
        self.observation_space = gymnasium.spaces.Box(0, 255, frame.shape, np.uint8)
        self.action_space = gymnasium.spaces.Discrete(len(ACTIONS))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts the maze of ``seed`` (that of ``MazeEnv.reset(seed)``), or without a seed a random one."""
        super().reset(seed=seed)
        task_seed = int(self.np_random.integers(2**32)) if seed is None else seed
        observation, info = self.maze_env.reset(task_seed)
        return observation.image, _with_text(info, observation)

    def step(self, action: int | np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Plays one action.

        Raises:
            InvalidAction: it is none of 0 to 4.
            RuntimeError: the episode has ended or was never started.
        """
        if not self.action_space.contains(action):
            known = ", ".join(f"{number} {name}" for number, name in enumerate(ACTIONS))
            raise InvalidAction(f"action {action!r} is unknown; there are {known}")
        observation, reward, terminated, truncated, info = self.maze_env.step(answer_text(ACTIONS[action]))
        return observation.image, reward, terminated, truncated, _with_text(info, observation)

    def render(self) -> np.ndarray | None:
        """The current frame, or None without a render mode."""
        return self.maze_env.frame() if self.render_mode == "rgb_array" else None


def _with_text(info: dict[str, Any], observation: Observation) -> dict[str, Any]:
    return {**info, "text": observation.text}


def register_maze() -> None:
    """Makes ``clew/Maze-v0`` known to Gymnasium, without a time limit: the maze has its own turn cap."""
    if ENV_ID not in gymnasium.registry:
        register(id=ENV_ID, entry_point="clew.envs.gym_env:MazeGymEnv")
