"""Task lists: held out means held out, every task can be solved, and the task is worth the name."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from clew.envs.base import Suite, Task
from clew.envs.maze_env import MazeEnv
from clew.envs.navigators import REFERENCES, fallible
from clew.envs.suites import (
    SUITES,
    belongs_to_imitation,
    content_hashes,
    maze_suite,
    refuse_overlap,
    suite_settings,
    take_distinct,
    training_tasks,
)
from clew.errors import UserError
from clew.evaluation.evaluate import reference
from clew.evaluation.suites import environment_settings
from clew.recipe import load_recipe

RECIPE: dict[str, Any] = environment_settings(load_recipe("laptop"))
# 15 trees, and paths of two or three moves: a world of some hundred problems, in which seeds collide.
SMALL: dict[str, Any] = {"size": (2, 3), "min_path": 2, "max_path": 3, "max_turns": 5}


def all_suites(base: dict[str, Any], size: int) -> list[Suite]:
    suites: list[Suite] = []
    for name in SUITES:
        suites.append(maze_suite(name, base, size, apart_from=suites))
    return suites


def success(suite: Suite, policy: str, seed: int) -> int:
    env, solved = MazeEnv(**suite.env_kwargs), 0
    navigate = REFERENCES[policy]()
    for task in suite.tasks:
        rng = random.Random(f"{seed}/{policy}/{task.content_hash}")
        _, info = env.reset(task.seed)
        assert info["content_hash"] == task.content_hash
        over = False
        while not over:
            _, _, terminated, truncated, info = env.step(navigate(env, rng))
            over = terminated or truncated
        solved += info["success"]
    return solved


def test_the_oracle_solves_every_maze_of_every_suite_within_its_cap() -> None:
    suites = all_suites(RECIPE, 64)
    for suite in suites:
        assert len(suite.tasks) == 64
        assert success(suite, "oracle", 0) == 64, suite.name
    assert len(content_hashes(suites)) == 64 * len(SUITES)


def test_blind_policies_fail_on_the_held_out_set() -> None:
    heldout = maze_suite("heldout", RECIPE, 64)
    assert reference(heldout, "random", 0).solve_rate <= 0.05
    assert reference(heldout, "no-turn-back", 0).solve_rate <= 0.25
    assert reference(heldout, "oracle", 0).solved == 64


def test_suites_change_what_they_say() -> None:
    def paths(suite: Suite) -> set[int]:
        env = MazeEnv(**suite.env_kwargs)
        return {env.make(task.seed).path_length for task in suite.tasks}

    by_name = {suite.name: suite for suite in all_suites(RECIPE, 16)}
    assert by_name["heldout"].env_kwargs == by_name["unseen"].env_kwargs == RECIPE
    assert by_name["larger"].env_kwargs["size"] == (6, 8)
    assert by_name["braided"].env_kwargs["braid"] > 0
    assert by_name["colours"].env_kwargs["palette"] != "day"
    assert by_name["stop"].env_kwargs["goal"] == "stop"
    assert min(paths(by_name["longer"])) > 12 >= max(paths(by_name["heldout"]))
    assert paths(by_name["heldout"]) <= set(range(7, 13))


@pytest.mark.parametrize("goal", ["reach", "stop"])
def test_every_suite_of_a_tight_recipe_is_solvable(goal: str) -> None:
    base = {**SMALL, "size": (3, 3), "max_turns": 3 + (goal == "stop"), "goal": goal}
    for suite in all_suites(base, 8):
        assert success(suite, "oracle", 0) == 8, suite.name


def test_suites_are_disjoint_by_content_where_seeds_collide() -> None:
    env = MazeEnv(**SMALL)
    assert len({env.task(seed).content_hash for seed in range(400)}) < 200  # collisions are certain
    heldout = maze_suite("heldout", SMALL, 40)
    unseen = maze_suite("unseen", SMALL, 10, apart_from=[heldout])  # also when it is the smaller one
    colours = maze_suite("colours", SMALL, 20, apart_from=[heldout, unseen])
    assert [len(content_hashes([suite])) for suite in (heldout, unseen, colours)] == [40, 10, 20]
    assert len(content_hashes([heldout, unseen, colours])) == 70


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert maze_suite("heldout", RECIPE, 64).tasks[:16] == maze_suite("heldout", RECIPE, 16).tasks


def test_too_large_a_suite_is_refused_with_the_key() -> None:
    with pytest.raises(UserError, match=r"evaluation\.size: suite 'heldout' can't have 5000 different tasks"):
        maze_suite("heldout", {**SMALL, "size": (2, 2), "max_path": 2, "max_turns": 3}, 5000)
    with pytest.raises(UserError, match=r"evaluation\.suites: 'huge' is unknown; there are heldout"):
        suite_settings("huge", RECIPE)


def test_training_skips_held_out_content_and_the_share_of_imitation() -> None:
    env = MazeEnv(**SMALL)
    held_out = content_hashes([maze_suite("heldout", SMALL, 60)])
    stream = list(itertools.islice(training_tasks(env, held_out, seed=3), 3000))
    seen = {task.content_hash for _, task in stream}
    everything = {env.task(seed).content_hash for seed in range(5000)}
    # Nothing forbidden, nothing missing: all the rest of this small world.
    assert seen == {h for h in everything - held_out if not belongs_to_imitation(h)}
    for _, task in stream:
        assert env.task(task.seed) == task
    seeds = [task.seed for _, task in stream]
    assert seeds == sorted(set(seeds))
    skipped = set(range(seeds[0], seeds[-1])) - set(seeds)
    assert any(env.task(seed).content_hash in held_out for seed in skipped)


def test_the_training_stream_goes_on_where_it_was_left() -> None:
    env = MazeEnv(**SMALL)
    held_out = content_hashes([maze_suite("heldout", SMALL, 60)])
    whole = list(itertools.islice(training_tasks(env, held_out, 3), 40))
    for cut in (1, 17, 39):
        position = whole[cut - 1][0]
        assert list(itertools.islice(training_tasks(env, held_out, 3, position), 40 - cut)) == whole[cut:]
    assert [t for _, t in itertools.islice(training_tasks(env, held_out, 4), 40)] != [t for _, t in whole]


def test_a_stream_with_nothing_left_ends_in_a_clear_error() -> None:
    env = MazeEnv(size=(2, 2), min_path=2, max_path=2, max_turns=3)
    everything = frozenset(env.task(seed).content_hash for seed in range(500))
    with pytest.raises(UserError, match="none is left to train on"):
        next(training_tasks(env, everything, seed=0))


def test_imitation_and_reinforcement_share_the_world_evenly() -> None:
    env = MazeEnv(**RECIPE)
    imitation = sum(belongs_to_imitation(env.task(seed).content_hash) for seed in range(400))
    assert 150 < imitation < 250


def test_a_list_that_overlaps_is_refused() -> None:
    heldout = maze_suite("heldout", SMALL, 40)
    held_out = content_hashes([heldout])
    stolen = heldout.tasks[7]
    own = [task for _, task in itertools.islice(training_tasks(MazeEnv(**SMALL), held_out, 0), 5)]
    refuse_overlap("tasks.jsonl", own, held_out)
    # Another seed with the same content is the same maze.
    twin = Task(stolen.env_id, 77, stolen.content_hash)
    with pytest.raises(UserError, match=r"tasks\.jsonl: 1 of its tasks are held out .* seed 77\); remove them"):
        refuse_overlap("tasks.jsonl", [*own, twin], held_out)


def test_the_demonstrator_errs_and_still_arrives() -> None:
    suite = maze_suite("heldout", RECIPE, 64)
    env, lengths, shortest = MazeEnv(**RECIPE), [], []
    for task in suite.tasks:
        _, info = env.reset(task.seed)
        navigate, rng = fallible(0.3), random.Random(task.seed)
        for turn in range(1, 16):
            _, _, terminated, _, step_info = env.step(navigate(env, rng))
            assert step_info["feedback"] in ("moved", "reached")  # it never walks into walls
            if terminated:
                lengths.append(turn)
                shortest.append(info["path_length"])
                break
    assert 16 < len(lengths) < 64
    assert sum(lengths) > sum(shortest)


def test_a_step_shows_no_maze_twice_and_goes_on_behind_the_last_one() -> None:
    tasks = [Task("clew/Maze-v0", seed, content) for seed, content in enumerate("abacbd")]
    stream = iter([(task.seed + 1, task) for task in tasks])
    assert [(p, t.content_hash) for p, t in take_distinct(stream, 3)] == [(1, "a"), (2, "b"), (4, "c")]
    assert next(stream)[1].content_hash == "b"


def test_too_few_different_mazes_for_a_step_are_named() -> None:
    task = Task("clew/Maze-v0", 0, "a")
    with pytest.raises(UserError, match=r"training\.prompts_per_step"):
        take_distinct(itertools.repeat((1, task)), 2)
