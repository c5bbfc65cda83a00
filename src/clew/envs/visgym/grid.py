"""The map of VisGym's two-dimensional maze: free cells, distances, directions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Cell = tuple[int, int]
_SHIFT = ((0, 1), (-1, 0), (0, -1), (1, 0))  # right, up, left, down


class Grid:
    """A map of cells with the distance of each free one to the target.

    Args:
        walls: rows of cells, 1 where there is a wall.
        target: (row, column).

    Attributes:
        distance: moves from each cell to the target; cells that can't reach it are not there.
    """

    def __init__(self, walls: Sequence[Sequence[int]], target: Cell) -> None:
        self._walls = walls
        self.distance: dict[Cell, int] = {target: 0}
        reached = deque([target])
        while reached:
            cell = reached.popleft()
            for direction in self.exits(cell):
                other = self.beside(cell, direction)
                if other not in self.distance:
                    self.distance[other] = self.distance[cell] + 1
                    reached.append(other)

    def beside(self, cell: Cell, direction: int) -> Cell:
        """The cell in that direction, free or not."""
        down, right = _SHIFT[direction]
        return cell[0] + down, cell[1] + right

    def exits(self, cell: Cell) -> list[int]:
        """The directions without a wall."""
        return [d for d in range(4) if self._free(self.beside(cell, d))]

    def nearer(self, cell: Cell) -> list[int]:
        """The directions on a shortest path to the target."""
        here = self.distance[cell]
        return [d for d in self.exits(cell) if self.distance[self.beside(cell, d)] == here - 1]

    def _free(self, cell: Cell) -> bool:
        row, column = cell
        return 0 <= row < len(self._walls) and 0 <= column < len(self._walls[0]) and self._walls[row][column] == 0
