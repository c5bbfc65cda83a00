"""Finds VisGym's fork of Gymnasium on this machine and says what it lacks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from clew.envs.visgym.pool import CHILD
from clew.errors import UserError

VARIABLE = "CLEW_VISGYM"
HOW_TO_GET = (
    "clone VisGym's repository (github.com/visgym/VisGym, commit 0289034 is the one that was tried) and name its "
    f"folder in {VARIABLE} or runtime.visgym_path; what its mazes need is in an extra: pip install 'clew[gym]'"
)
REQUIRED = ("numpy", "pygame", "cloudpickle", "farama_notifications")
"""What ``maze_2d`` imports."""

# What a task imports beyond REQUIRED (module name -> package). Tasks that aren't named need data sets of their own.
TASKS: dict[str, dict[str, str]] = {
    "maze_2d": {},
    "maze_3d": {"ursina": "ursina==7.0.0"},
    "matchstick_equation": {"PIL": "pillow"},
    "matchstick_rotation": {"matplotlib": "matplotlib"},
    "patch_reassembly": {"PIL": "pillow"},
    "sliding_block": {"cv2": "opencv-python-headless"},
}


configured: str | None = None
"""Folder of the fork in this process; set by ``configure``. None: what ``CLEW_VISGYM`` names."""


def find_fork(path: str | None = None) -> Path:
    """The folder of the fork: ``path``, what was configured, or what ``CLEW_VISGYM`` names.

    Raises:
        UserError: none is named, or what is named is not the fork.
    """
    path = path or configured
    named = path or os.environ.get(VARIABLE)
    source = "runtime.visgym_path" if path else VARIABLE
    if not named:
        raise UserError(f"environment.id: VisGym is not installed here ({VARIABLE} is not set): {HOW_TO_GET}")
    folder = Path(named).expanduser()
    core = folder / "gymnasium" / "core.py"
    if not core.is_file():
        raise UserError(
            f"{source}: {folder} holds no gymnasium/core.py, so it is not VisGym's repository: {HOW_TO_GET}"
        )
    if "class VLMEnvMixin" not in core.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{source}: {folder} is a Gymnasium that is not VisGym's fork: {HOW_TO_GET}")
    return folder.resolve()


def missing_packages(task: str = "maze_2d") -> list[str]:
    """Packages that a task (``maze_2d``) imports and this Python does not have, as pip knows them."""
    needed = {**{module: module.replace("_", "-") for module in REQUIRED}, **TASKS.get(task, {})}
    return [package for module, package in needed.items() if find_spec(module) is None]


def child_command(path: str | None, task: str) -> tuple[str, ...]:
    """The command that starts a process for a task.

    Raises:
        UserError: the fork or a package is missing.
    """
    fork = find_fork(path)
    if missing := missing_packages(task):
        raise UserError(
            f"environment.id: VisGym's {task} needs packages that are missing: pip install {' '.join(missing)}"
        )
    return (*CHILD, str(fork))
