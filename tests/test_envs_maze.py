"""Mazes against references that share no code: Kirchhoff, networkx, Floyd-Warshall, and the pixels."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clew.envs.maze import PALETTES, ROOM_PIXELS, Maze, _spanning_tree, distances, draw, make_maze

STEP = {0: (-1, 0), 1: (0, 1), 2: (1, 0), 3: (0, -1)}
sides_2_to_7 = st.tuples(st.integers(2, 7), st.integers(2, 7))


def graph_of(rows: int, cols: int, open_sides: list[int] | tuple[int, ...]) -> nx.Graph:
    """The rooms and open borders as a graph; fails if a border is open from one side or leads outside."""
    arrows = set()
    for room, sides in enumerate(open_sides):
        row, col = divmod(room, cols)
        for direction, (d_row, d_col) in STEP.items():
            if sides >> direction & 1:
                assert 0 <= row + d_row < rows and 0 <= col + d_col < cols, "a side is open to the outside"
                arrows.add((room, (row + d_row) * cols + col + d_col))
    assert arrows == {(b, a) for a, b in arrows}, "a border is open from one side only"
    graph = nx.Graph(list(arrows))
    graph.add_nodes_from(range(rows * cols))
    return graph


def kirchhoff(rows: int, cols: int) -> int:
    """The number of spanning trees of a lattice: any cofactor of its Laplacian (Kirchhoff 1847)."""
    laplacian = np.zeros((rows * cols, rows * cols))
    for row, col in itertools.product(range(rows), range(cols)):
        for other_row, other_col in ((row, col + 1), (row + 1, col)):
            if other_row < rows and other_col < cols:
                a, b = row * cols + col, other_row * cols + other_col
                laplacian[a, a] += 1
                laplacian[b, b] += 1
                laplacian[a, b] -= 1
                laplacian[b, a] -= 1
    return round(np.linalg.det(laplacian[1:, 1:]))


def chi_square(counts: Counter, cells: int) -> float:
    expected = counts.total() / cells
    return sum((n - expected) ** 2 for n in counts.values()) / expected + (cells - len(counts)) * expected


def chi_square_limit(freedom: int, normal_quantile: float = 3.29) -> float:
    """The chi-square value exceeded with probability 5e-4 (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + normal_quantile * (2 / (9 * freedom)) ** 0.5) ** 3


def depth_first_tree(rng: random.Random, rows: int, cols: int) -> list[int]:
    """The maze that everybody writes first: far from uniform."""
    open_sides, seen, path = [0] * (rows * cols), {0}, [0]
    while path:
        row, col = divmod(path[-1], cols)
        ways = [
            (d, (row + dr) * cols + col + dc)
            for d, (dr, dc) in STEP.items()
            if 0 <= row + dr < rows and 0 <= col + dc < cols and (row + dr) * cols + col + dc not in seen
        ]
        if not ways:
            path.pop()
            continue
        direction, other = rng.choice(ways)
        open_sides[path[-1]] |= 1 << direction
        open_sides[other] |= 1 << (direction + 2) % 4
        seen.add(other)
        path.append(other)
    return open_sides


@pytest.mark.parametrize(("rows", "cols", "trees"), [(2, 3, 15), (3, 3, 192)])
def test_wilson_draws_every_spanning_tree_equally_often(rows: int, cols: int, trees: int) -> None:
    assert kirchhoff(rows, cols) == trees
    rng = random.Random(1)
    counts = Counter(tuple(_spanning_tree(rng, rows, cols)) for _ in range(50 * trees))
    assert len(counts) == trees  # every one, and with graph_of below nothing else
    assert all(nx.is_tree(graph_of(rows, cols, tree)) for tree in counts)
    assert chi_square(counts, trees) < chi_square_limit(trees - 1)


def test_the_uniformity_test_has_teeth() -> None:
    rng = random.Random(1)
    counts = Counter(tuple(depth_first_tree(rng, 3, 3)) for _ in range(50 * 192))
    assert chi_square(counts, 192) > 5 * chi_square_limit(191)


@given(sides_2_to_7, st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_one_path_joins_any_two_rooms(size: tuple[int, int], seed: int) -> None:
    rows, cols = size
    maze = make_maze(seed, rows, cols, 1, rows * cols - 1)
    graph = graph_of(rows, cols, maze.open_sides)
    assert nx.is_tree(graph)
    assert nx.shortest_path_length(graph, maze.start, maze.goal) == maze.path_length > 0


@given(sides_2_to_7, st.integers(0, 2**40), st.floats(0, 1), st.data())
@settings(max_examples=40, deadline=None)
def test_the_path_is_in_range_and_shortest_also_with_loops(
    size: tuple[int, int], seed: int, braid: float, data: st.DataObject
) -> None:
    rows, cols = size
    low = data.draw(st.integers(1, (rows + cols) // 2))
    high = data.draw(st.integers(low, low + 6))
    maze = make_maze(seed, rows, cols, low, high, braid)
    graph = graph_of(rows, cols, maze.open_sides)
    assert nx.is_connected(graph)
    assert low <= maze.path_length <= high
    assert nx.shortest_path_length(graph, maze.start, maze.goal) == maze.path_length
    assert make_maze(seed, rows, cols, low, high, braid) == maze


def test_braid_opens_dead_ends_and_makes_loops() -> None:
    def loops_and_dead_ends(braid: float) -> tuple[int, int]:
        loops = dead_ends = 0
        for seed in range(50):
            maze = make_maze(seed, 6, 6, 6, 12, braid)
            graph = graph_of(6, 6, maze.open_sides)
            loops += graph.number_of_edges() - (36 - 1)
            dead_ends += sum(degree == 1 for _, degree in graph.degree)
        return loops, dead_ends

    none, half, full = (loops_and_dead_ends(braid) for braid in (0.0, 0.5, 1.0))
    assert none[0] == 0 < half[0] < full[0]
    assert none[1] > half[1] > full[1] == 0


@given(st.integers(2, 5), st.integers(2, 5), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_distances_are_those_of_floyd_and_warshall(rows: int, cols: int, rng: random.Random) -> None:
    n = rows * cols
    open_sides = [0] * n
    matrix = np.where(np.eye(n, dtype=bool), 0.0, np.inf)
    for room, (direction, shift) in itertools.product(range(n), ((1, 1), (2, cols))):  # parts may be cut off
        if (direction == 2 or (room + 1) % cols) and room + shift < n and rng.random() < 0.6:
            open_sides[room] |= 1 << direction
            open_sides[room + shift] |= 1 << (direction ^ 2)
            matrix[room, room + shift] = matrix[room + shift, room] = 1
    for k in range(n):
        matrix = np.minimum(matrix, matrix[:, k : k + 1] + matrix[k : k + 1])
    expected = np.where(np.isinf(matrix), -1, matrix).astype(int)
    for source in range(n):
        assert distances(rows, cols, open_sides, source) == expected[source].tolist()


def test_impossible_paths_are_refused() -> None:
    with pytest.raises(ValueError, match="no 2x2 maze with a path of 4 to 9 moves"):
        make_maze(0, 2, 2, 4, 9)


# --- content ---------------------------------------------------------------------------------------------


def test_the_hash_tells_every_problem_of_a_small_world_apart() -> None:
    rng = random.Random(0)
    problems = {}
    for rows, cols in ((2, 3), (3, 2)):
        trees = {tuple(_spanning_tree(rng, rows, cols)) for _ in range(500)}
        assert len(trees) == 15
        for tree, start, goal in itertools.product(trees, range(6), range(6)):
            problems[rows, tree, start, goal] = Maze(rows, cols, tree, start, goal, 1).content_hash
    assert len(set(problems.values())) == len(problems) == 2 * 15 * 36


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_hash_is_equal_for_equal_content_only(data: st.DataObject) -> None:
    def content() -> tuple:
        rows, cols = data.draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (1, 12), (2, 6), (6, 2), (12, 12)]))
        room = st.integers(0, rows * cols - 1)
        sides = data.draw(st.sampled_from([0, 1, 15]))
        return rows, cols, (sides,) * (rows * cols), data.draw(room), data.draw(room)

    one, other = content(), content()
    assert (Maze(*one, 3).content_hash == Maze(*other, 3).content_hash) == (one == other)
    assert Maze(*one, 3).content_hash == Maze(*one, 4).content_hash  # the length follows from the content


def test_seeds_mean_the_same_mazes_for_ever() -> None:
    """Shipped weights rely on it: what was held out when they were trained must still be."""
    hashes = [make_maze(seed, 6, 6, 6, 12).content_hash for seed in (0, 1, 1_000_000_000)]
    assert hashes == ["45da033d2d32781e", "4390610f50507e4c", "0fc09320fc34299f"]
    assert make_maze(0, 6, 6, 6, 12, braid=0.5).content_hash == "a8b4655dd5a20577"


# --- frames ----------------------------------------------------------------------------------------------


def read_frame(frame: np.ndarray, palette: str) -> tuple[list[int], int, list[int]]:
    """Open sides, the goal, and the rooms with an agent, from nothing but the pixels."""
    floor, wall, agent, goal = (np.array(colour) for colour in PALETTES[palette])
    rows, cols = frame.shape[0] // ROOM_PIXELS, frame.shape[1] // ROOM_PIXELS
    open_sides, agents, goals = [], [], []
    for room in range(rows * cols):
        top, left = (ROOM_PIXELS * i for i in divmod(room, cols))
        tile = frame[top : top + ROOM_PIXELS, left : left + ROOM_PIXELS]
        middle = slice(4, -4)
        edges = (tile[0, middle], tile[middle, -1], tile[-1, middle], tile[middle, 0])
        sides = 0
        for direction, edge in enumerate(edges):
            assert (edge == edge[0]).all()
            assert (edge[0] == wall).all() or (edge[0] == floor).all()
            sides |= (edge[0] == floor).all() << direction
        open_sides.append(int(sides))
        # Visible means: at least a tenth of the room is in that colour.
        tenth = ROOM_PIXELS**2 // 10
        if (tile == agent).all(axis=-1).sum() >= tenth:
            agents.append(room)
        if (tile == goal).all(axis=-1).sum() >= tenth:
            goals.append(room)
    assert len(goals) == 1
    return open_sides, goals[0], agents


@given(sides_2_to_7, st.integers(0, 2**40), st.sampled_from(sorted(PALETTES)), st.data())
@settings(max_examples=40, deadline=None)
def test_the_frame_shows_the_whole_problem(size: tuple[int, int], seed: int, palette: str, data: st.DataObject) -> None:
    rows, cols = size
    maze = make_maze(seed, rows, cols, 1, rows * cols - 1, braid=0.3)
    agent = data.draw(st.integers(0, rows * cols - 1))
    frame = draw(maze, agent, palette)
    assert frame.dtype == np.uint8 and frame.shape == (rows * 16, cols * 16, 3)
    assert frame.flags.c_contiguous and frame.flags.writeable
    open_sides, goal, agents = read_frame(frame, palette)
    assert tuple(open_sides) == maze.open_sides
    assert goal == maze.goal
    if agent != goal:  # on the goal it is drawn smaller, inside the square
        assert agents == [agent]
    else:
        assert (frame == np.array(PALETTES[palette][2])).all(axis=-1).sum() >= 16


def test_a_wall_is_at_least_three_pixels_thick() -> None:
    maze = make_maze(0, 6, 6, 6, 12)
    wall = (draw(maze, maze.start) == np.array(PALETTES["day"][1])).all(axis=-1)
    for room in range(36):
        row, col = divmod(room, 6)
        if col < 5:
            right = wall[row * 16 + 8, col * 16 + 8 : col * 16 + 24].sum()
            assert right == (0 if maze.open_sides[room] & 2 else 4)
        if row < 5:
            down = wall[row * 16 + 8 : row * 16 + 24, col * 16 + 8].sum()
            assert down == (0 if maze.open_sides[room] & 4 else 4)


@pytest.mark.parametrize("palette", sorted(PALETTES))
def test_colours_are_far_apart(palette: str) -> None:
    for one, other in itertools.combinations(np.array(PALETTES[palette], float), 2):
        assert np.linalg.norm(one - other) > 75


def test_a_frame_is_nobody_elses() -> None:
    maze = make_maze(0, 3, 3, 1, 8)
    first = draw(maze, maze.start)
    kept = first.copy()
    first[:] = 0
    assert np.array_equal(draw(maze, maze.start), kept)
