"""Environments that are seen as images and played by text (no torch in here).

``clew/Maze-v0`` is the native one; importing this package also registers it with Gymnasium.
``check_image_env`` tells the author of another environment what breaks the contract (``ImageEnv``).
"""

from clew.envs.base import ImageEnv, Observation, Suite, Task
from clew.envs.checker import check_image_env
from clew.envs.gym_env import MazeGymEnv, register_maze
from clew.envs.maze_env import MazeEnv
from clew.envs.registry import make_env
from clew.envs.suites import SUITES, maze_suite

__all__ = [
    "SUITES",
    "ImageEnv",
    "MazeEnv",
    "MazeGymEnv",
    "Observation",
    "Suite",
    "Task",
    "check_image_env",
    "make_env",
    "maze_suite",
]

register_maze()
