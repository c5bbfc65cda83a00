"""A real `clew serve` for the tests: the shipped model, good adapters and every kind of broken one."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import torch
from processes import alive, descendants

from clew.policy.adapter import Adapter, attach_lora, current_adapter, write_adapter
from clew.policy.model import load_model

WARM_START = Path(str(resources.files("clew") / "assets" / "warm-start"))
GOOD = ("good-1", "good-2", "good-3", "good-4", "good-5")
BROKEN = (
    "dora",
    "foreign",
    "other-base",
    "not-finite",
    "half",
    "pickled",
    "rank",
    "truncated",
    "vision",
    "no-json",
)


@dataclass
class ChatServer:
    """A running server.

    Attributes:
        port: on 127.0.0.1.
        process: ``clew serve``.
        adapters: the folder it serves.
    """

    port: int
    process: subprocess.Popen[str]
    adapters: Path

    @property
    def url(self) -> str:
        """Of the API."""
        return f"http://127.0.0.1:{self.port}/v1"


def make_adapters(folder: Path) -> None:
    """Adapters of the shipped model: those that work, and those that don't."""
    vlm = load_model(WARM_START)
    policy = attach_lora(vlm, 4, 8, 0.0)
    for seed, name in enumerate(GOOD):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter_name, parameter in policy.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        write(folder / name, current_adapter(policy, seed))
    good = current_adapter(policy, 9)
    key = next(k for k in good.tensors if "lora_B" in k)
    write(folder / "dora", replace(good, config={**good.config, "use_dora": True}))
    doubled = {k: torch.cat([v, v], 0 if "lora_B" in k else 1) for k, v in good.tensors.items()}
    write(folder / "foreign", replace(good, tensors=doubled))
    write(folder / "not-finite", replace(good, tensors={**good.tensors, key: good.tensors[key] * float("nan")}))
    write(folder / "half", replace(good, tensors={k: v for k, v in good.tensors.items() if k != key}))
    write(folder / "rank", replace(good, config={**good.config, "r": 5}))
    vision = {k.replace("language_model.layers", "visual.blocks"): v for k, v in good.tensors.items()}
    write(folder / "vision", replace(good, tensors=vision))
    for name in ("truncated", "pickled", "no-json", "other-base"):
        write(folder / name, good)
    weights = folder / "truncated" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    shutil.move(folder / "pickled" / "adapter_model.safetensors", folder / "pickled" / "adapter_model.bin")
    (folder / "no-json" / "adapter_config.json").write_text("{")
    _other_base(folder / "other-base")


def _other_base(folder: Path) -> None:
    """As Clew exports it, of a model of the same shape."""
    from clew.checkpoint import write_directory

    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)

    def fill(staging: Path) -> None:
        for name, content in files.items():
            (staging / name).write_bytes(content)

    write_directory(folder, fill, {"base_sha256": "0" * 64, "base_model": "somewhere"})


def write(folder: Path, adapter: Adapter) -> None:
    """Writes an adapter's folder."""
    folder.mkdir(parents=True)
    write_adapter(adapter, folder)


@contextmanager
def running(adapters: Path, *options: str, env: dict[str, str] | None = None) -> Iterator[ChatServer]:
    """Starts the command and stops it; nothing of it may be left."""
    from conftest import start_clew

    arguments = ["serve", "--model", "package:warm-start", "--adapters", adapters, "--port", "0", *options]
    process = start_clew(*arguments, env=env or {})
    assert process.stdout is not None
    said = ""
    port = None
    for line in process.stdout:
        said += line
        if (match := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)) is not None:
            port = int(match[1])
        if line.startswith("try:"):
            break
    if port is None:
        raise AssertionError(f"clew serve did not start: {said}{process.communicate()[1]}")
    children = descendants(process.pid)
    try:
        yield ChatServer(port, process, adapters)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert not [child for child in children if alive(child)], "processes are left"
