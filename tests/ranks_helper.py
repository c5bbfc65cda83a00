"""Ranks for the tests of the sharded policy: real processes that share a gloo process group.

They are forked from a server that has imported everything once, so that a group is up in a second.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from clew.training.learner import Learner
from clew.training.ranks import Ranks

HANG_S = 120.0  # a collective that some rank never joins


# --- groups of processes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How a rank ended: with a value, with an error (its traceback), or by a signal (a negative exit code)."""

    code: int
    value: Any = None
    error: str | None = None


def start_server() -> Any:
    """The context whose processes have the ranks' work, and all that it needs, imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_work"])
    path = os.pathsep.join(filter(None, sys.path))
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def ends(size: int, work: Callable[..., Any], *arguments: Any) -> list[End]:
    """Runs ``work(ranks, *arguments)`` on ``size`` ranks (a single one has no process group)."""
    context = start_server()
    meeting = Path(tempfile.mkdtemp(prefix="clew-ranks-"))
    processes, pipes = [], []
    try:
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, meeting, rank, size, work, arguments))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(mine)
        deadline = time.monotonic() + 3 * HANG_S
        found = []
        for process, pipe in zip(processes, pipes, strict=True):
            value, error = None, None
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                try:
                    value, error = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    error = "it ended without an answer"
            else:
                error = "it hung"
                process.kill()
            process.join(30)
            found.append(End(process.exitcode, value, error))
        return found
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        shutil.rmtree(meeting)


def together(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``work`` returned on each rank; all must have come to a good end."""
    found = ends(size, work, *arguments)
    failed = [
        f"rank {rank} of {size} ended with {end.code}: {end.error}" for rank, end in enumerate(found) if end.error
    ]
    if failed:  # of several, the one that did not merely lose its peer is the cause
        raise AssertionError("\n".join(sorted(failed, key=lambda text: "Connection closed" in text)))
    return [end.value for end in found]


def _rank(
    pipe: Connection, meeting: Path, rank: int, size: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    value, error = None, None
    try:
        if size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{meeting}/meet",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=HANG_S),
            )
        value = work(Ranks(rank, size), *arguments)
        if size > 1:
            dist.destroy_process_group()
    except BaseException:
        error = traceback.format_exc()
    pipe.send_bytes(pickle.dumps((value, error)))  # plain pickle: tensors go by value


# --- adapters --------------------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, gathered from its shards."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


@torch.no_grad()
def set_adapter(learner: Learner, scale: float = 0.05, seed: int = 1) -> None:
    """The initial A matrices, and B matrices of noise: a fresh adapter has no gradient in A."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in learner.policy.named_parameters():
        if "lora_B" in name:
            noise = scale * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
            parameter.copy_(noise)


def adapter_of(learner: Learner) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in learner.policy.named_parameters() if "lora_" in name}


@torch.no_grad()
def put_back(learner: Learner, weights: dict[str, Tensor]) -> None:
    for name, parameter in learner.policy.named_parameters():
        if name in weights:
            value = weights[name]
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
