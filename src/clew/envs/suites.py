"""Fixed task lists: the held-out set, the suites never trained on, and the stream of training tasks.

Disjointness is by content (walls, start and goal), never by seed. The even content hashes belong to
imitation, the odd ones to reinforcement learning, and whatever is in an evaluation suite to neither.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from clew.envs.base import ImageEnv, Suite, Task
from clew.envs.maze_env import ENV_ID, MazeEnv
from clew.envs.registry import make_env
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
"""The suites of the native maze; every other environment has the two of ``OTHER_SUITES``."""
OTHER_SUITES = ("heldout", "unseen")
_SEEDS_PER_RUN = 10_000_000
_SKIPS_IN_A_ROW = 10_000  # then there is nothing (or next to nothing) left to find
_FOREIGN_SKIPS_IN_A_ROW = 1_000  # where every look at a task costs a frame


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


def is_env_id(name: str) -> bool:
    """Whether a suite's name is that of an environment: then it is that environment's seeds from 0 on."""
    return ":" in name


def file_stem(suite: str) -> str:
    """A suite's name as it stands in file names: ``visgym:maze_2d/easy`` becomes ``visgym-maze_2d-easy``."""
    return suite.translate(str.maketrans(":/", "--"))


def suite_names(env_id: str) -> tuple[str, ...]:
    """The suites that can be made of an environment by name."""
    return SUITES if env_id == ENV_ID else OTHER_SUITES


def maze_suite(name: str, base: dict[str, Any], size: int, apart_from: Iterable[Suite] = ()) -> Suite:
    """A suite of the native maze, for an agent trained under ``base`` (see ``make_suite``)."""
    return make_suite(name, ENV_ID, suite_settings(name, base), size, apart_from)


def make_suite(name: str, env_id: str, settings: dict[str, Any], size: int, apart_from: Iterable[Suite] = ()) -> Suite:
    """The first ``size`` tasks of a suite: no content twice, and none that is in the suites ``apart_from``.

    Environments that are not Clew's own are known by their seeds ("seeds 0-63"), so their lists begin at 0.

    Raises:
        UserError: the environment can't be made, or there are too few different tasks.
        ValueError: its settings allow no maze.
    """
    env = make_env(env_id, **settings)
    try:
        first = 0 if env_id != ENV_ID and name != "unseen" else _FIRST_SEED[name]
        taken = set(content_hashes(apart_from))
        tasks: list[Task] = []
        skipped = 0
        for seed in count(first):
            if len(tasks) == size:
                break
            task = task_of(env, seed)
            if task.content_hash not in taken:
                taken.add(task.content_hash)
                tasks.append(task)
                skipped = 0
            elif (skipped := skipped + 1) == _skips(env):
                key = "evaluation.confirm_size" if name == "unseen" else "evaluation.size"
                raise UserError(
                    f"{key}: suite {name!r} can't have {size} different tasks of {env_id} (found {len(tasks)}); "
                    f"{_remedy(env_id, len(taken))}"
                )
    finally:
        env.close()
    return Suite(name, env_id, settings, tuple(tasks))


def _skips(env: ImageEnv) -> int:
    return _SKIPS_IN_A_ROW if env.env_id == ENV_ID else _FOREIGN_SKIPS_IN_A_ROW


def _remedy(env_id: str, n_contents: int) -> str:
    if n_contents == 1:
        return (
            "its first frame is the same for every seed, so nothing can be held out: "
            "name an environment whose reset(seed=...) draws a new task (see docs/gymnasium.md)"
        )
    return "ask for fewer, or make environment.size larger" if env_id == ENV_ID else "ask for fewer"


def task_of(env: ImageEnv, seed: int) -> Task:
    """The task of a seed."""
    if isinstance(env, MazeEnv):  # which knows it without drawing a frame
        return env.task(seed)
    return Task(env.env_id, seed, env.reset(seed)[1]["content_hash"])


def fingerprint(env: ImageEnv) -> str:
    """What an environment shows of its seed 0, instructions included (SHA-256): another version shows another thing."""
    observation, info = env.reset(0)
    shown = [env.prompt, observation.text, info["content_hash"], str(observation.image.shape)]
    return hashlib.sha256("\0".join(shown).encode() + observation.image.tobytes()).hexdigest()


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

    Args:
        env: says what a seed's task is; closed with the stream.

    Raises:
        UserError: (nearly) nothing is left to train on.
    """
    skipped = 0
    with contextlib.closing(env):
        for offset in count(position):
            seed_of_task = seed * _SEEDS_PER_RUN + offset
            task = task_of(env, seed_of_task)
            if task.content_hash not in held_out and not belongs_to_imitation(task.content_hash):
                skipped = 0
                yield offset + 1, task
            elif (skipped := skipped + 1) == _skips(env):
                key, remedy = ("size", "make it larger, or") if env.env_id == ENV_ID else ("id", "make")
                raise UserError(
                    f"environment.{key}: {skipped:,} tasks in a row are held out or belong to imitation, so none "
                    f"is left to train on; {remedy} evaluation.size smaller"
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
        f"training.prompts_per_step: only {len(drawn)} different tasks were found for a step of {n}; "
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
