"""What Ray costs: the same training step in one process, and on Ray with one policy worker and one transformers engine.

    python benchmarks/ray_overhead.py

Both runtimes are up in one run and take turns, step by step, on the same tasks of `laptop`, in batches large enough for
a step of several seconds; the first step of each (warm-up) is left out. A step is play, update, and the new adapter
loaded by the engine. Reports medians, the median of the ratios of neighbours, and the slowest adapter sync.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from clew.envs.base import Task
from clew.envs.registry import make_env
from clew.envs.suites import take_distinct, training_tasks
from clew.evaluation.suites import environment_settings
from clew.recipe import Recipe, load_recipe
from clew.rollout.engine import Sampling
from clew.rollout.episodes import Limits
from clew.rollout.rollouts import LocalRollouts, Rollouts
from clew.runtime.cluster import cluster
from clew.runtime.process import prepare_process
from clew.training.learner import Learner
from clew.training.policy import Policy
from clew.training.samples import prepare

BATCH = ["training.prompts_per_step=48", "rollout.concurrent_episodes=384"]
TARGET, TARGET_SYNC_S, TARGET_STEP_S = 1.3, 0.5, 5.0
PARTS = ("rollout", "update", "adapter to the engine")


def step_times(
    recipe: Recipe, policy: Policy, rollouts: Rollouts, drawn: list[tuple[int, Task]], step: int
) -> tuple[float, ...]:
    """Seconds of the parts of one training step."""
    new_env = partial(make_env, recipe.environment.id, **environment_settings(recipe))
    attempts = [(task, k) for _, task in drawn for k in range(recipe.algorithm.group_size)]
    sampling = Sampling(recipe.rollout.temperature, recipe.rollout.max_new_tokens)
    limits = Limits(recipe.rollout.max_tokens, recipe.rollout.deadline_s, recipe.rollout.concurrent_episodes)
    moments = [time.perf_counter()]
    trajectories = rollouts.play(new_env, attempts, sampling, limits, ("train", recipe.training.seed, step))
    moments.append(time.perf_counter())
    policy.update(*prepare(trajectories, recipe.algorithm), step)
    moments.append(time.perf_counter())
    rollouts.load(policy.publish(step))
    moments.append(time.perf_counter())
    return tuple(b - a for a, b in itertools.pairwise(moments))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    arguments = parser.parse_args()
    recipe = load_recipe("laptop", [*BATCH, "runtime.kind=ray"])
    prepare_process(recipe)
    learner = Learner(recipe)
    settings = environment_settings(recipe)
    tasks = training_tasks(make_env(recipe.environment.id, **settings), frozenset(), seed=0)
    found: dict[str, list[tuple[float, ...]]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "recipe.toml").touch()
        with cluster(recipe, Path(folder), print) as (policy, fleet):
            runtimes: dict[str, tuple[Policy, Rollouts]] = {
                "local": (learner, LocalRollouts.of(learner.vlm, learner.features)),
                "ray": (policy, fleet),
            }
            for trained, players in runtimes.values():
                players.load(trained.publish(0))
            for step in range(1, arguments.steps + 1):
                drawn = take_distinct(tasks, recipe.training.prompts_per_step)
                for name, (trained, players) in runtimes.items():
                    found[name].append(step_times(recipe, trained, players, drawn, step))
                    print(step, name, *(f"{part} {s:.2f} s" for part, s in zip(PARTS, found[name][-1], strict=True)))
    warm = {name: rows[1:] for name, rows in found.items()}
    print("| runtime | step, s | " + " | ".join(f"{part}, s" for part in PARTS) + " |")
    print("|---" * (len(PARTS) + 2) + "|")
    for name, rows in warm.items():
        parts = " | ".join(f"{median(row[i] for row in rows):.2f}" for i in range(len(PARTS)))
        print(f"| {name} | {median(map(sum, rows)):.2f} | {parts} |")
    ratios = [sum(ray) / sum(local) for local, ray in zip(warm["local"], warm["ray"], strict=True)]
    sync = max(row[2] for row in warm["ray"])
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"Ray / local, step by step: median {median(ratios):.2f} ({spread}), at most {TARGET}")
    print(f"slowest sync {sync:.3f} s, under {TARGET_SYNC_S}")
    long_enough = median(map(sum, warm["local"])) > TARGET_STEP_S
    return 0 if median(ratios) <= TARGET and sync < TARGET_SYNC_S and long_enough else 1


if __name__ == "__main__":
    sys.exit(main())
