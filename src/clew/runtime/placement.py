"""Who runs where: from a recipe to nodes, devices, policy ranks and engines. Pure; imports no Ray and no torch."""

from __future__ import annotations

from dataclasses import dataclass

from clew.recipe import Recipe

HEAD_CPUS = 0
"""CPUs that the head offers to Ray: none, so that nothing is ever placed on it (``num-cpus: 0``)."""


@dataclass(frozen=True)
class Device:
    """One GPU, or one share of a CPU machine, and who uses it.

    Attributes:
        node: number of its node.
        index: its number on that node.
        rank: the policy worker on it, if any.
        engine: the engine on it, if any.
    """

    node: int
    index: int
    rank: int | None
    engine: int | None


@dataclass(frozen=True)
class Node:
    """One machine that works."""

    index: int
    devices: tuple[Device, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Policy ranks on this node, in order."""
        return tuple(device.rank for device in self.devices if device.rank is not None)

    @property
    def engines(self) -> tuple[int, ...]:
        """Engines on this node, in order."""
        return tuple(device.engine for device in self.devices if device.engine is not None)


@dataclass(frozen=True)
class Placement:
    """Where every policy rank and every engine sits.

    Attributes:
        nodes: the machines that work; the head is none of them.
        colocate: whether an engine shares the device of a policy rank.
    """

    nodes: tuple[Node, ...]
    colocate: bool

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, node by node."""
        return tuple(device for node in self.nodes for device in node.devices)

    @property
    def ranks(self) -> tuple[Device, ...]:
        """The device of each policy rank: ``ranks[i].rank == i``."""
        return tuple(device for device in self.devices if device.rank is not None)

    @property
    def engines(self) -> tuple[Device, ...]:
        """The device of each engine: ``engines[i].engine == i``."""
        return tuple(device for device in self.devices if device.engine is not None)


def place(recipe: Recipe) -> Placement:
    """Places a recipe's policy workers and engines.

    Ranks are numbered node by node. Engines are spread evenly: two nodes differ by one engine at most, the first nodes
    have the more. Colocated, the j-th engine of a node shares the device of its j-th rank (so with as many engines as
    ranks, engine i is on the device of rank i); apart, engines have devices of their own behind those of the ranks.
    A recipe never asks for more colocated engines than ranks (``clew.recipe.checks``).
    """
    runtime = recipe.runtime
    nodes = []
    first_engine = 0
    for index in range(runtime.nodes):
        engines = runtime.engines // runtime.nodes + (index < runtime.engines % runtime.nodes)
        ranks = [index * runtime.workers_per_node + i for i in range(runtime.workers_per_node)]
        numbers = [first_engine + i for i in range(engines)]
        first_engine += engines
        users: list[tuple[int | None, int | None]]
        if runtime.colocate:
            users = [(rank, numbers[i] if i < engines else None) for i, rank in enumerate(ranks)]
        else:
            users = [*((rank, None) for rank in ranks), *((None, number) for number in numbers)]
        nodes.append(Node(index, tuple(Device(index, i, *user) for i, user in enumerate(users))))
    return Placement(tuple(nodes), runtime.colocate)
