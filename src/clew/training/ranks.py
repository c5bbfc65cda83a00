"""The processes that train one policy together, and what they must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train the policy; alone by default.

    With ``size`` > 1 a ``torch.distributed`` process group must be up, and every method is a collective: all ranks
    call it, in the same order.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def highest(self, values: Sequence[float]) -> list[float]:
        """Maxima over all ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def from_first(self, value: T) -> T:
        """What rank 0 has."""
        if self.size == 1:
            return value
        box: list[T | None] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box)
        return box[0]  # type: ignore[return-value]

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()


ALONE = Ranks()


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Splits items over ``parts`` so that their total weights are nearly equal: indices of each part, ascending.

    The heaviest item first, each to the part that is lightest so far (Graham 1969, longest processing time first:
    no part is heavier than 4/3 of the best possible). Ties go to the lower index, so every rank finds the same split.
    """
    totals = [0] * parts
    split: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        lightest = min(range(parts), key=lambda part: (totals[part], part))
        totals[lightest] += weights[item]
        split[lightest].append(item)
    return [sorted(part) for part in split]
