"""Mazes on a lattice of rooms: made, measured, hashed and drawn; no agent and no episode here.

A maze is a grid of rooms. Each room holds a four-bit set of open sides (up 1, right 2, down 4, left 8).
Wilson's algorithm draws a uniform spanning tree, so exactly one path joins any two rooms; ``braid`` then
opens a share of the dead ends, which makes loops.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

DIRECTIONS = ("up", "right", "down", "left")
_SHIFT = ((-1, 0), (0, 1), (1, 0), (0, -1))
ROOM_PIXELS = 16


@dataclass(frozen=True)
class Maze:
    """One maze with its start and goal.

    Attributes:
        rows, cols: size of the lattice, in rooms.
        open_sides: for each room in row-major order, the open sides (up 1, right 2, down 4, left 8).
        start, goal: room indices (row * cols + col).
        path_length: moves of the shortest path from start to goal.
    """

    rows: int
    cols: int
    open_sides: tuple[int, ...]
    start: int
    goal: int
    path_length: int

    @property
    def content_hash(self) -> str:
        """What makes two mazes the same problem: size, walls, start and goal (16 hex digits of SHA-256)."""
        walls = bytes((self.rows, self.cols, *self.open_sides))
        return hashlib.sha256(walls + f"{self.start},{self.goal}".encode()).hexdigest()[:16]

    def neighbour(self, room: int, direction: int) -> int | None:
        """The room behind the open side ``direction`` (index into DIRECTIONS), or None at a wall."""
        if not self.open_sides[room] & (1 << direction):
            return None
        d_row, d_col = _SHIFT[direction]
        return room + d_row * self.cols + d_col

    def exits(self, room: int) -> list[int]:
        """The open directions of a room, as indices into DIRECTIONS."""
        return [d for d in range(4) if self.open_sides[room] & (1 << d)]


@lru_cache(maxsize=64)
def _lattice(rows: int, cols: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For each room, its (direction, neighbour) pairs, walls ignored."""
    return tuple(
        tuple(
            (d, (row + dr) * cols + col + dc)
            for d, (dr, dc) in enumerate(_SHIFT)
            if 0 <= row + dr < rows and 0 <= col + dc < cols
        )
        for row in range(rows)
        for col in range(cols)
    )


def _spanning_tree(rng: random.Random, rows: int, cols: int) -> list[int]:
    """Wilson (1996): loop-erased random walks give a uniform spanning tree."""
    lattice = _lattice(rows, cols)
    uniform = rng.random
    n_rooms = rows * cols
    open_sides = [0] * n_rooms
    in_tree = [False] * n_rooms
    in_tree[int(uniform() * n_rooms)] = True
    last_exit: list[tuple[int, int]] = [(0, 0)] * n_rooms
    for first in range(n_rooms):
        room = first
        while not in_tree[room]:
            ways = lattice[room]
            way = ways[int(uniform() * len(ways))]
            last_exit[room] = way  # a later visit overwrites an earlier one: that erases the loop
            room = way[1]
        room = first
        while not in_tree[room]:
            direction, following = last_exit[room]
            open_sides[room] |= 1 << direction
            open_sides[following] |= 1 << (direction ^ 2)
            in_tree[room] = True
            room = following
    return open_sides


def _open_dead_ends(rng: random.Random, rows: int, cols: int, open_sides: list[int], share: float) -> None:
    """Opens one more side of ``share`` of the dead ends (a "braided" maze: it has loops)."""
    lattice = _lattice(rows, cols)
    for room in range(rows * cols):
        if open_sides[room].bit_count() == 1 and rng.random() < share:
            closed = [way for way in lattice[room] if not open_sides[room] & (1 << way[0])]
            direction, other = closed[int(rng.random() * len(closed))]
            open_sides[room] |= 1 << direction
            open_sides[other] |= 1 << (direction ^ 2)


def distances(rows: int, cols: int, open_sides: tuple[int, ...] | list[int], source: int) -> list[int]:
    """Breadth-first distances in moves from ``source`` to every room (-1 where it can't be reached)."""
    steps = (-cols, 1, cols, -1)
    distance = [-1] * (rows * cols)
    distance[source] = 0
    frontier = [source]
    while frontier:
        reached = []
        for room in frontier:
            sides = open_sides[room]
            further = distance[room] + 1
            for direction in range(4):
                if sides >> direction & 1:
                    other = room + steps[direction]
                    if distance[other] < 0:
                        distance[other] = further
                        reached.append(other)
        frontier = reached
    return distance


def make_maze(seed: int, rows: int, cols: int, min_path: int, max_path: int, braid: float = 0.0) -> Maze:
    """Makes the maze of a seed; its shortest path has between ``min_path`` and ``max_path`` moves.

    Raises:
        ValueError: no maze of this size has such a path, or hardly one does (10,000 tries failed).
    """
    rng = random.Random(seed)
    n_rooms = rows * cols
    for _ in range(10_000):
        open_sides = _spanning_tree(rng, rows, cols)
        if braid:
            _open_dead_ends(rng, rows, cols, open_sides, braid)
        start = int(rng.random() * n_rooms)
        distance = distances(rows, cols, open_sides, start)
        goals = [room for room in range(n_rooms) if min_path <= distance[room] <= max_path]
        if goals:
            goal = goals[int(rng.random() * len(goals))]
            return Maze(rows, cols, tuple(open_sides), start, goal, distance[goal])
    raise ValueError(
        f"no {rows}x{cols} maze with a path of {min_path} to {max_path} moves was found: make size "
        "larger or the paths shorter"
    )


def best_directions(maze: Maze, distance_to_goal: list[int], room: int) -> list[int]:
    """The directions that lie on a shortest path from ``room`` to where ``distance_to_goal`` was measured."""
    here = distance_to_goal[room]
    return [d for d in maze.exits(room) if distance_to_goal[maze.neighbour(room, d)] == here - 1]  # type: ignore[index]


# --- drawing ---------------------------------------------------------------------------------------------

# RGB of floor, wall, agent, goal. "day" is what agents are trained on; the others only test them.
PALETTES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "day": ((244, 241, 234), (52, 58, 70), (36, 98, 214), (214, 62, 44)),
    "dusk": ((222, 214, 235), (84, 56, 92), (28, 112, 160), (226, 96, 40)),
    "night": ((38, 42, 54), (200, 204, 212), (94, 158, 255), (255, 122, 98)),
}
_WALL_PIXELS = 2  # on each side of a border: a wall between two rooms is 4 pixels thick


@lru_cache(maxsize=16)
def _tiles(palette: str) -> np.ndarray:
    """Every room that can be drawn: uint8 [16 open-side sets, 4 (empty, agent, goal, both), P, P, 3]."""
    floor, wall, agent, goal = PALETTES[palette]
    size, w = ROOM_PIXELS, _WALL_PIXELS
    axis = np.arange(size) - (size - 1) / 2
    radius = np.hypot(axis[:, None], axis[None, :])
    disc = radius <= 4.2
    square = (np.abs(axis)[:, None] <= 4.6) & (np.abs(axis)[None, :] <= 4.6)
    tiles = np.empty((16, 4, size, size, 3), np.uint8)
    for sides in range(16):
        room = np.empty((size, size, 3), np.uint8)
        room[:] = floor
        edges = (np.s_[:w, :], np.s_[:, -w:], np.s_[-w:, :], np.s_[:, :w])
        for direction, edge in enumerate(edges):
            if not sides & (1 << direction):
                room[edge] = wall
        for corner in (np.s_[:w, :w], np.s_[:w, -w:], np.s_[-w:, :w], np.s_[-w:, -w:]):
            room[corner] = wall
        tiles[sides, :] = room
        tiles[sides, 1][disc] = agent
        tiles[sides, 2][square] = goal
        tiles[sides, 3][square] = goal
        tiles[sides, 3][radius <= 3.0] = agent
    tiles.setflags(write=False)
    return tiles


def draw(maze: Maze, agent: int, palette: str = "day") -> np.ndarray:
    """The frame with the agent in room ``agent``: uint8 RGB [rows * 16, cols * 16, 3]."""
    content = np.zeros(maze.rows * maze.cols, np.intp)
    content[agent] += 1
    content[maze.goal] += 2
    rooms = _tiles(palette)[np.array(maze.open_sides), content]
    grid = rooms.reshape(maze.rows, maze.cols, ROOM_PIXELS, ROOM_PIXELS, 3).swapaxes(1, 2)
    return grid.reshape(maze.rows * ROOM_PIXELS, maze.cols * ROOM_PIXELS, 3)
