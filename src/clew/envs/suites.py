"""Fixed task lists: the held-out set, the suites never trained on, and the stream of training tasks.

Disjointness is by content (walls, start and goal), never by seed. The even content hashes belong to
imitation, the odd ones to reinforcement learning, and whatever is in an evaluation suite to neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from clew.envs.base import ImageEnv, Suite, Task
from clew.envs.maze_env import MazeEnv
from clew.errors import UserError

# Where each list looks for its seeds: far apart, so that lists can grow without meeting.
_FIRST_SEED = {
    "heldout": 1_000_000_000,
    "unseen": 2_000_000_000,
    "larger": 3_000_000_000,
    "braided": 4_000_000_000,
    "colours": 5_000_000_000,
    "longer": 6_000_000_000,
    "stop": 7_000_000_000,
}
SUITES = tuple(_FIRST_SEED)
_SEEDS_PER_RUN = 10_000_000
_SKIPS_IN_A_ROW = 10_000  # then there is nothing (or next to nothing) left to find


def suite_settings(name: str, base: dict[str, Any]) -> dict[str, Any]:
    """Settings of a suite for an agent trained under ``base`` (keyword arguments of ``MazeEnv``).

    Every suite's cap leaves room for each of its mazes: ``MazeEnv`` refuses any other.
    """
    rows, cols = base["size"]
    longest, cap = base["max_path"], base["max_turns"]
    changes: dict[str, dict[str, Any]] = {
        "heldout": {},
        "unseen": {},
        "larger": {"size": (rows + 2, cols + 2), "max_path": longest + 4, "max_turns": cap + 5},
        "braided": {"braid": 0.5},
        "colours": {"palette": "dusk"},
        "longer": {"min_path": longest + 1, "max_path": longest + 6, "max_turns": cap + 9},
        "stop": {"goal": "stop", "max_turns": max(cap, longest + 1)},
    }
    if name not in changes:
        raise UserError(f"evaluation.suites: {name!r} is unknown; there are {', '.join(SUITES)}")
    return {**base, **changes[name]}


def maze_suite(name: str, base: dict[str, Any], size: int, apart_from: Iterable[Suite] = ()) -> Suite:
    """The first ``size`` tasks of a suite: no content twice, and none that is in the suites ``apart_from``.

    Raises:
        UserError: the suite is unknown, or there are too few different mazes.
        ValueError: its settings allow no maze.
    """
    env = MazeEnv(**suite_settings(name, base))
    taken = set(content_hashes(apart_from))
    tasks: list[Task] = []
    skipped = 0
    for seed in count(_FIRST_SEED[name]):
        if len(tasks) == size:
            break
        task = env.task(seed)
        if task.content_hash not in taken:
            taken.add(task.content_hash)
            tasks.append(task)
            skipped = 0
        elif (skipped := skipped + 1) == _SKIPS_IN_A_ROW:
            key = "evaluation.confirm_size" if name == "unseen" else "evaluation.size"
            raise UserError(
                f"{key}: suite {name!r} can't have {size} different mazes (found {len(tasks)}); "
                "ask for fewer, or make environment.size larger"
            )
    return Suite(name, suite_settings(name, base), tuple(tasks))


def content_hashes(suites: Iterable[Suite]) -> frozenset[str]:
    """The content of all tasks of all suites."""
    return frozenset(task.content_hash for suite in suites for task in suite.tasks)


def belongs_to_imitation(content_hash: str) -> bool:
    """Whether a maze may be demonstrated (even hashes) or is left to reinforcement learning (odd ones)."""
    return int(content_hash[-1], 16) % 2 == 0


def training_tasks(env: ImageEnv, held_out: frozenset[str], seed: int, position: int = 0) -> Iterator[tuple[int, Task]]:
    """The endless stream of training tasks of a run, from ``position`` on: (next position, task).

    Held-out content and content that belongs to imitation is skipped; small mazes collide, so skipping goes
    by content.

    Raises:
        UserError: (nearly) nothing is left to train on.
    """
    skipped = 0
    for offset in count(position):
        seed_of_task = seed * _SEEDS_PER_RUN + offset
        task = Task(env.env_id, seed_of_task, env.reset(seed_of_task)[1]["content_hash"])
        if task.content_hash not in held_out and not belongs_to_imitation(task.content_hash):
            skipped = 0
            yield offset + 1, task
        elif (skipped := skipped + 1) == _SKIPS_IN_A_ROW:
            raise UserError(
                f"environment.size: {skipped:,} mazes in a row are held out or belong to imitation, so none "
                "is left to train on; make it larger, or evaluation.size smaller"
            )


def take_distinct(tasks: Iterator[tuple[int, Task]], n: int) -> list[tuple[int, Task]]:
    """The next ``n`` tasks of a stream with content of their own: a group is one maze, so a step shows it once.

    Raises:
        UserError: there are hardly ``n`` different mazes to train on.
    """
    drawn: dict[str, tuple[int, Task]] = {}
    for _ in range(_SKIPS_IN_A_ROW):
        position, task = next(tasks)
        drawn.setdefault(task.content_hash, (position, task))
        if len(drawn) == n:
            return list(drawn.values())
    raise UserError(
        f"training.prompts_per_step: only {len(drawn)} different mazes were found for a step of {n}; "
        "ask for fewer, or make environment.size larger"
    )


def refuse_overlap(name: str, tasks: Iterable[Task], held_out: frozenset[str]) -> None:
    """Refuses a user's own task list that contains held-out content.

    Raises:
        UserError: names the first overlapping seed and how many there are.
    """
    overlapping = [task for task in tasks if task.content_hash in held_out]
    if overlapping:
        raise UserError(
            f"{name}: {len(overlapping)} of its tasks are held out for evaluation (the first is seed "
            f"{overlapping[0].seed}); remove them"
        )
