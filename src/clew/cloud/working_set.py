"""What goes with a job: the recipe, and the Python modules beside it that it names. No run data, no secrets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rich.filesize import decimal

from clew.checkpoint.lock import LOCK_NAME
from clew.cloud.secrets import holds_secret, is_secret_file
from clew.errors import UserError
from clew.recipe import Recipe, shipped_recipes
from clew.runtime.run_directory import RECIPE

RECIPE_FILE = "clew-recipe.toml"
"""The resolved recipe, at the root of the working set."""
LIMIT = 20_000_000
"""Bytes that a working set may have: code, not data. The head keeps it in memory."""
FILES_LIMIT = 2000
_FOLDERS = {"__pycache__", "node_modules", "venv", "site-packages", "build", "dist", "htmlcov"}
_RUN_FOLDERS = {"runs", "prepared", "checkpoints", "adapters", "tensorboard", "wandb", "mlruns", "outputs"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz")
_OTHERS = (".pyc", ".pyo", ".log", ".zip", ".tar", ".gz", ".tgz", ".whl", ".sqlite", ".db")


@dataclass(frozen=True)
class WorkingSet:
    """A folder that goes to the cluster as it is.

    Attributes:
        folder: the job's working directory.
        files: relative path -> size in bytes, sorted.
        digest: 12 hexadecimal digits that tell contents apart.
    """

    folder: Path
    files: dict[str, int]
    digest: str

    def describe(self) -> str:
        """One line: what goes, how many files and how large."""
        size = decimal(sum(self.files.values()))
        if len(self.files) == 1:
            return f"working set: {RECIPE_FILE}, {size}"
        others = [name for name in self.files if name != RECIPE_FILE]
        shown = ", ".join(others[:8]) + (f" and {len(others) - 8} more" if len(others) > 8 else "")
        return f"working set: {len(self.files)} files, {size}: {RECIPE_FILE}, {shown}"


def module_folder(name_or_path: str, recipe: Recipe) -> Path | None:
    """The recipe's folder, if its environment is made by a Python module that lies there; else None."""
    parts = recipe.environment.id.split(":")
    if parts[0] != "gym" or len(parts) < 3 or name_or_path in shipped_recipes():
        return None
    folder, top = Path(os.path.abspath(name_or_path)).parent, parts[1].partition(".")[0]
    there = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
    return folder if there else None


def pack(recipe: Recipe, modules: Path | None, to: Path) -> WorkingSet:
    """Makes the working set of a recipe in an empty folder.

    Args:
        modules: a folder to go with the recipe (see ``module_folder``), without run data, weights, caches, hidden
            files, links and what is named as secrets are.
        to: the folder to fill.

    Raises:
        UserError: it is too large, something in it can't be read, or a file holds a secret.
    """
    text = recipe.to_toml()
    try:
        found = dict(_find(modules)) if modules is not None else {}
        sizes = {name: path.stat().st_size for name, path in found.items()}
    except OSError as error:
        raise _unreadable(error.filename, error) from error
    _check_size({**sizes, RECIPE_FILE: len(text.encode())}, modules)
    digest = hashlib.sha256()
    files = {}
    for name in sorted([*found, RECIPE_FILE]):
        content = text.encode() if name == RECIPE_FILE else _read(found[name])
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(content)
        files[name] = len(content)
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return WorkingSet(to, files, digest.hexdigest()[:12])


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    if holds_secret(content.replace(b"\0", b"").decode("utf-8", "replace")):  # UTF-16 is ASCII with zeros between
        raise UserError(
            f"{path} would go to the cluster with the recipe and holds what looks like a key or a token: take it out "
            "of the file, or move the file out of the recipe's folder"
        )
    return content


def _unreadable(path: object, error: OSError) -> UserError:
    return UserError(f"{path}, which would go with the recipe, cannot be read: {error.strerror}")


def _find(folder: Path) -> Iterator[tuple[str, Path]]:
    """Files of a folder that may go: relative path and path. OSError: it can't be looked through."""

    def fail(error: OSError) -> NoReturn:  # what can't be looked into would be missing there without a word
        raise error

    count = 0
    for root, folders, names in os.walk(folder, onerror=fail):
        here = Path(root)
        folders[:] = sorted(name for name in folders if _may_enter(here / name))
        for name in sorted(names):
            path = here / name
            if path.is_symlink() or not path.is_file() or not _may_go(name):
                continue
            relative = str(path.relative_to(folder))
            if relative != relative.encode(errors="replace").decode():
                raise UserError(f"the name of {relative!r} in {folder} is not UTF-8: rename it")
            count += 1
            if count > FILES_LIMIT:
                raise UserError(
                    f"{folder} holds more than {FILES_LIMIT:,} files, all of which would go to the cluster: put the "
                    "recipe and its Python modules into a folder of their own"
                )
            yield relative, path


def _may_enter(folder: Path) -> bool:
    name = folder.name.lower()
    if name.startswith(".") or name in _FOLDERS | _RUN_FOLDERS or name.endswith(".egg-info") or folder.is_symlink():
        return False
    if is_secret_file(name):
        return False
    parts = (LOCK_NAME, "metrics.jsonl", "checkpoints")
    run = (folder / RECIPE).is_file() and any((folder / part).exists() for part in parts)
    model = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return not (run or model or (folder / "pyvenv.cfg").is_file())


def _may_go(name: str) -> bool:
    low = name.lower()
    return not (
        low.startswith(".") or low.endswith((*_WEIGHTS, *_OTHERS)) or name == RECIPE_FILE or is_secret_file(name)
    )


def _check_size(sizes: dict[str, int], folder: Path | None) -> None:
    total = sum(sizes.values())
    if total <= LIMIT:
        return
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    named = ", ".join(f"{name} {decimal(size)}" for name, size in largest)
    raise UserError(
        f"{folder} would go to the cluster with {decimal(total)}, and at most {decimal(LIMIT)} may (largest: {named}): "
        "put data on the cluster's shared file system, or the recipe and its Python modules into a folder of their own"
    )
