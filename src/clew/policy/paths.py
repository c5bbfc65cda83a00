"""Where a recipe's model lies and on what it runs."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

import torch

from clew.errors import UserError
from clew.recipe import WARM_START, ModelTable, Recipe


def resolve_model_path(model: ModelTable) -> str:
    """The folder or hub id to load; ``package:warm-start`` becomes the folder shipped with Clew.

    Raises:
        UserError: the shipped folder is missing, or a path that looks local does not exist.
    """
    path = model.path
    if path == WARM_START:
        folder = Path(str(resources.files("clew") / "assets" / "warm-start"))
        if not (folder / "config.json").is_file():
            raise UserError(f"model.path: {path} is missing from this installation; make it with `clew sft laptop`")
        return str(folder)
    local = Path(path).expanduser()
    if local.exists():
        return str((local / (model.subfolder or "")).resolve())
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(f"model.path: there is no folder {path}; name a Hugging Face folder, a hub id or {WARM_START}")
    return path


def resolve_device(recipe: Recipe) -> str:
    """``auto`` is CUDA where there is one.

    Raises:
        UserError: CUDA is asked for and absent.
    """
    if recipe.model.device == "cuda" and not torch.cuda.is_available():
        raise UserError('model.device: "cuda" is asked for and torch sees none; use "cpu" or "auto"')
    if recipe.model.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return recipe.model.device


def resolve_dtype(recipe: Recipe) -> torch.dtype:
    """The torch dtype of the recipe's number format."""
    return getattr(torch, recipe.model.dtype)


def base_fingerprint(path: str) -> str:
    """SHA-256 over a local folder's weight files (name and content), or of the id where it is no folder."""
    digest = hashlib.sha256()
    folder = Path(path)
    if not folder.is_dir():
        return hashlib.sha256(path.encode()).hexdigest()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
