"""Where served adapters come from: a folder of this machine, or a prefix in S3. Safetensors only, never a pickle."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open

from clew.checkpoint import DamagedCheckpoint, read_manifest, verify
from clew.checkpoint.durable import MANIFEST
from clew.errors import UserError
from clew.policy.adapter import CONFIG_FILE, WEIGHTS_FILE
from clew.serving.names import check_adapter_name, is_adapter_name, parse_s3

CONFIG, WEIGHTS, CARD = CONFIG_FILE, WEIGHTS_FILE, "README.md"
LIMITS = {CONFIG: 1 << 20, WEIGHTS: 5 << 30, CARD: 1 << 20, MANIFEST: 1 << 20}
"""The files of an adapter and the most bytes each may have. 5 GiB is also the most that S3 takes in one piece."""
PICKLED = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
# What a run keeps beside its adapters and does not offer: clew.policy.export and clew.checkpoint rename to these.
_SET_ASIDE = (".superseded-", ".damaged-")


class UnknownAdapter(Exception):
    """There is no (whole) adapter of that name."""


class BrokenAdapter(Exception):
    """An adapter that can't be served; the message is for clients: what is wrong, no path of this machine."""


class StorageTrouble(Exception):
    """The store can't be asked now (away, denied, disk full); the message is for clients."""


class AdapterStore(Protocol):
    """Adapters by name. Both methods block (disk, network)."""

    def names(self) -> list[str]:
        """Names of the whole adapters, sorted.

        Raises:
            StorageTrouble: the store can't be read.
        """

    def fetch(self, name: str) -> Path:
        """A local folder with the adapter's files, checked: sizes, safetensors, and its manifest if it has one.

        Raises:
            UnknownAdapter: there is none, or nothing can have that name.
            BrokenAdapter: it is damaged, too large, or not safetensors.
            StorageTrouble: the store can't be read.
        """


def open_store(place: str, cache: Path) -> AdapterStore:
    """The store at ``s3://bucket/prefix``, in a folder of adapter folders, in a run, or of one adapter folder.

    S3 is not asked yet: ``names()`` is what finds out whether it answers.

    Args:
        cache: folder for what is downloaded from S3; a private folder is made in it.

    Raises:
        UserError: there is no such place, or boto3 is missing.
    """
    if "://" in place:
        from clew.serving.s3 import S3Store

        return S3Store(parse_s3(place), cache)
    return LocalStore(Path(place))


class LocalStore:
    """Adapters in folders of this machine. What lies outside the folder is not served, whatever a link says."""

    def __init__(self, place: Path) -> None:
        """Args: a folder of adapter folders, a run directory or its ``adapters``, or one adapter's folder."""
        if not place.is_dir():
            raise UserError(
                f"--adapters {place}: there is no such folder; give a folder of adapters or s3://bucket/prefix"
            )
        self._only: str | None = None
        if (place / "recipe.toml").is_file():
            if (place / "exports").is_dir():
                raise UserError(f"--adapters {place} is a SkyRL run: take its adapters out with `clew export` first")
            if not (place / "adapters").is_dir():
                raise UserError(f"--adapters {place} is a run that has exported no adapter yet: go on with clew train")
            place = place / "adapters"
        self._root = self._bounds = place.resolve()
        if _is_file(place / CONFIG):
            self._only, self._root = check_adapter_name(self._root.name), self._root.parent
            if not self._offered(self._only):
                raise UserError(f"--adapters {place}: its files are links to outside; copy the adapter with its files")

    def names(self) -> list[str]:
        """See ``AdapterStore``."""
        if self._only is not None:
            return [self._only]
        try:
            return sorted(entry.name for entry in self._root.iterdir() if self._offered(entry.name))
        except OSError as error:
            raise StorageTrouble(f"the folder of adapters can't be read ({error.strerror})") from error

    def fetch(self, name: str) -> Path:
        """See ``AdapterStore``; the folder is the adapter's own, not a copy."""
        if not self._offered(name):
            raise unknown(name)
        check_files(self._root / name, name)
        return self._root / name

    def _offered(self, name: str) -> bool:
        if not is_adapter_name(name) or self._only not in (None, name) or any(mark in name for mark in _SET_ASIDE):
            return False
        folder = self._root / name
        # Real paths: neither the folder nor a file of it may be a link to somewhere else.
        return _is_file(folder / CONFIG) and all(
            Path(os.path.realpath(folder / file)).is_relative_to(self._bounds) for file in ("", *LIMITS)
        )


def unknown(name: str) -> UnknownAdapter:
    """The error for a name that nothing has."""
    return UnknownAdapter(f"there is no adapter {name[:128]!a}")


def check_sizes(sizes: dict[str, int], name: str) -> None:
    """Checks what an adapter consists of before a byte of it is read: file name -> bytes, all files of its folder.

    Raises:
        UnknownAdapter: it has no configuration, so it is not (wholly) there.
        BrokenAdapter: it has no weights in safetensors, or a file is too large.
    """
    if CONFIG not in sizes:
        raise unknown(name)
    if WEIGHTS not in sizes:
        if pickled := next((file for file in PICKLED if file in sizes), None):
            raise BrokenAdapter(f"adapter {name} has its weights in {pickled}, which is never loaded: use safetensors")
        raise BrokenAdapter(f"adapter {name} has no {WEIGHTS}")
    for file, limit in LIMITS.items():
        if sizes.get(file, 0) > limit:
            raise BrokenAdapter(
                f"adapter {name}: {file} has {sizes[file]} bytes, more than the {limit} that are allowed"
            )


def check_files(folder: Path, name: str) -> None:
    """Checks an adapter's folder: sizes, JSON, the structure of the safetensors file, and the manifest if there is one.

    Raises:
        UnknownAdapter: it has gone.
        BrokenAdapter: something is wrong with it.
        StorageTrouble: it can't be read.
    """
    try:
        check_sizes({entry.name: entry.stat().st_size for entry in folder.iterdir() if _is_file(entry)}, name)
        _check_manifest(folder, name)
        _check_config(folder, name)
        with safe_open(folder / WEIGHTS, framework="numpy") as weights:
            if not weights.keys():
                raise BrokenAdapter(f"adapter {name}: {WEIGHTS} holds no tensors")
    except SafetensorError as error:
        raise BrokenAdapter(f"adapter {name}: {WEIGHTS} is damaged, or no safetensors file") from error
    except FileNotFoundError as error:
        raise unknown(name) from error
    except OSError as error:
        raise StorageTrouble(f"adapter {name} can't be read ({error.strerror or type(error).__name__})") from error


def _check_manifest(folder: Path, name: str) -> None:
    if not _is_file(folder / MANIFEST):
        return
    try:
        listed = read_manifest(folder).files
        if outside := next((file for file in listed if file != Path(file).name), None):
            raise BrokenAdapter(f"adapter {name}: {MANIFEST} lists {outside[:80]!a}, which is no file of its folder")
        if missing := next((file for file in (WEIGHTS, CONFIG) if file not in listed), None):
            raise BrokenAdapter(f"adapter {name}: {MANIFEST} does not list {missing}")
        verify(folder)
    except DamagedCheckpoint as damage:
        raise BrokenAdapter(f"adapter {name} is damaged: {'; '.join(damage.problems[:3])}") from damage
    except UserError as error:  # no permission; its message names the path
        raise StorageTrouble(f"adapter {name} can't be read (no permission)") from error


def _check_config(folder: Path, name: str) -> None:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (ValueError, RecursionError) as error:
        raise BrokenAdapter(f"adapter {name}: {CONFIG} is no JSON") from error
    rank, alpha = (config.get("r"), config.get("lora_alpha")) if isinstance(config, dict) else (None, None)
    numbers = isinstance(rank, int) and isinstance(alpha, int | float) and 0 < rank < 1e6 and abs(alpha) < 1e6
    if not numbers:
        raise BrokenAdapter(
            f"adapter {name}: {CONFIG} is no configuration of a LoRA adapter (it needs r and lora_alpha)"
        )


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
