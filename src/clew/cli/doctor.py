"""``clew doctor``: what this machine has, and what Clew misses."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from clew import __version__
from clew.errors import UserError
from clew.recipe import Recipe
from clew.runtime.process import cores

_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "numpy",
    "pillow",
    "gymnasium",
    "pydantic",
    "tensorboard",
)
_EXTRAS = {
    "ray": 'runtime.kind = "ray", clew serve and clew submit',
    "vllm": 'rollout.engine = "vllm"',
    "boto3": "adapters in S3",
}
_MEMORY_NEEDED = 3.0  # GB, of the laptop recipe
_DISK_NEEDED = 1.0  # GB, of its run directory with room to spare


class Finding(NamedTuple):
    """One line: a name, what was found, and what is wrong with it ("" if nothing is)."""

    name: str
    found: str
    problem: str = ""


def findings(recipe: Recipe | None = None) -> Iterator[Finding]:
    """Looks at everything there is to look at; with a recipe, at what that needs of VisGym."""
    yield Finding("clew", __version__)
    old = sys.version_info < (3, 11)
    yield Finding("python", platform.python_version(), "Python 3.11 or later is needed" if old else "")
    for package in _PACKAGES:
        try:
            yield Finding(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding(package, "missing", "install Clew again (make setup)")
    for module, purpose in _EXTRAS.items():
        if find_spec(module) is None:
            yield Finding(module, f"not installed; needed for {purpose} only")
        else:  # vLLM for CPUs is another distribution of the same module
            names = metadata.packages_distributions()[module]
            yield Finding(module, ", ".join(f"{name} {metadata.version(name)}" for name in sorted(set(names))))
    yield _visgym(recipe)
    yield Finding("cores", f"{cores()} usable of {os.cpu_count()}")
    yield from _torch()
    memory = _memory_gb()
    if memory is not None:
        short = f"the laptop recipe takes up to {_MEMORY_NEEDED:.0f} GB" if memory < _MEMORY_NEEDED else ""
        yield Finding("memory", f"{memory:.1f} GB", short)
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield Finding("disk, here", f"{free:.1f} GB free", "free some space" if free < _DISK_NEEDED else "")
    yield Finding("this folder", str(Path.cwd()), "" if os.access(Path.cwd(), os.W_OK) else "no permission to write")
    warm_start = resources.files("clew") / "assets" / "warm-start" / "model.safetensors"
    there = warm_start.is_file()
    yield Finding("warm start", "shipped" if there else "missing", "" if there else "make it with clew sft laptop")


def _visgym(recipe: Recipe | None) -> Finding:
    from clew.envs.visgym import PREFIX
    from clew.envs.visgym.fork import HOW_TO_GET, VARIABLE, find_fork, missing_packages

    path = recipe.runtime.visgym_path if recipe else None
    env_id = recipe.environment.id if recipe else ""
    task = env_id.removeprefix(PREFIX).partition("/")[0] if env_id.startswith(PREFIX) else "maze_2d"
    if not path and not os.environ.get(VARIABLE) and not env_id.startswith(PREFIX):
        return Finding("VisGym", f"not here; needed for environments visgym:... only ({HOW_TO_GET})")
    try:
        fork = find_fork(path)
    except UserError as error:
        return Finding("VisGym", "not usable", str(error))
    missing = missing_packages(task)
    return Finding("VisGym", str(fork), f"pip install {' '.join(missing)}" if missing else "")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways, and this command is to say so
        yield Finding("torch threads", "unknown", f"torch can't be imported ({error})")
        return
    yield Finding("torch threads", f"{torch.get_num_threads()} by default; runtime.threads sets them")
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none; the CPU is used"
    yield Finding("GPU", cuda)


def _memory_gb() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (ValueError, OSError):  # the system doesn't tell
        return None


def show(recipe: Recipe | None = None) -> bool:
    """Prints the findings, with those of a recipe's needs if one is given; True if nothing is wrong."""
    table = Table(box=box.SIMPLE, show_header=False)
    wrong = 0
    for finding in findings(recipe):
        wrong += bool(finding.problem)
        verdict = Text(finding.problem, style="bold red") if finding.problem else Text("ok", style="green")
        table.add_row(finding.name, Text(finding.found), verdict)
    console = Console()
    console.print(table)
    console.print("nothing is missing" if not wrong else f"{wrong} to mend")
    return not wrong
