"""What depends on the device of a Ray run: decided here and nowhere else in the runtime."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import NamedTuple

import ray
import torch

from clew.recipe import Recipe
from clew.rollout.rollouts import device_name
from clew.runtime.placement import Placement


class Whereabouts(NamedTuple):
    """Where a worker runs: machine, its id in the Ray cluster, process, and what it computes on, in words."""

    host: str
    node: str
    pid: int
    device: str


def whereabouts(device: str) -> Whereabouts:
    """Of this process."""
    node = ray.get_runtime_context().get_node_id()
    return Whereabouts(socket.gethostname(), node, os.getpid(), device_name(torch.device(device)))


@dataclass(frozen=True)
class DevicePlan:
    """How workers use the devices they are placed on.

    Attributes:
        device: ``cuda`` or ``cpu``.
        backend: of ``torch.distributed`` between policy ranks.
        policy_share, engine_share: GPUs that Ray reserves for a policy worker and for an engine.
        worker_cpus: CPUs that Ray reserves for either: little on a CPU machine, where the real cap is their threads.
        policy_threads, engine_threads: CPU threads of a process.
        sleep: whether engines give the device up while the policy learns.
    """

    device: str
    backend: str
    policy_share: float
    engine_share: float
    worker_cpus: float
    policy_threads: int
    engine_threads: int
    sleep: bool


def plan_devices(recipe: Recipe, placement: Placement, gpus: float, cpus_per_node: float) -> DevicePlan:
    """Chooses for a cluster.

    Args:
        gpus: of the whole cluster.
        cpus_per_node: of a machine that works.
    """
    threads = recipe.runtime.threads
    cuda = gpus > 0 if recipe.model.device == "auto" else recipe.model.device == "cuda"
    # Policy and engines work in turns, so each may use all cores of its machine, shared among its like.
    policies = max(len(node.ranks) for node in placement.nodes)
    engines = max(len(node.engines) for node in placement.nodes)
    if cuda:
        # A share above half keeps two policy workers off one GPU: Ray fills a GPU that is in use before the next one.
        policy, engine = (0.6, 0.4) if placement.colocate else (1.0, 1.0)
        return DevicePlan("cuda", "nccl", policy, engine, 1.0, threads or 4, threads or 4, placement.colocate)
    return DevicePlan(
        "cpu",
        "gloo",
        0.0,
        0.0,
        0.01,
        threads or max(int(cpus_per_node) // policies, 1),
        threads or max(int(cpus_per_node) // max(engines, 1), 1),
        False,
    )
