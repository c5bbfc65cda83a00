"""Every check that ties several keys of a recipe together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from clew.recipe.schema import Recipe


class Conflict(NamedTuple):
    """Keys whose values can't stand together, and why, with a remedy."""

    message: str
    keys: tuple[str, ...]


def conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Yields every conflict, the plainest first."""
    if recipe.environment.id.startswith("clew/"):
        yield from _maze(recipe)
    if recipe.environment.id.startswith("visgym:") and recipe.environment.goal != "stop":
        yield Conflict(
            f'environment.goal = "{recipe.environment.goal}": in VisGym an episode ends when the agent says stop: '
            'set environment.goal = "stop"',
            ("environment.goal", "environment.id"),
        )
    if recipe.environment.id.startswith("gym:") and recipe.environment.goal != "reach":
        yield Conflict(
            f'environment.goal = "{recipe.environment.goal}" means nothing in Gymnasium: leave it out, and say what '
            "wins with environment.gymnasium.success",
            ("environment.goal", "environment.id"),
        )
    yield from _lengths(recipe)
    yield from _batches(recipe)
    yield from _runtime(recipe)
    yield from _cluster(recipe)


def _maze(recipe: Recipe) -> Iterator[Conflict]:
    env = recipe.environment
    if env.min_path > env.max_path:
        yield Conflict(
            f"environment.min_path = {env.min_path} is above environment.max_path = {env.max_path}: "
            "no maze has such a path; lower min_path or raise max_path",
            ("environment.min_path", "environment.max_path"),
        )
    rows, cols = env.size
    if env.min_path > rows * cols - 1:
        yield Conflict(
            f"environment.min_path = {env.min_path} is impossible with environment.size = [{rows}, {cols}]: "
            f"the longest path through its cells has {rows * cols - 1} moves; lower min_path or raise size",
            ("environment.min_path", "environment.size"),
        )
    turns = env.max_path + (env.goal == "stop")
    if turns > env.max_turns:
        stop = ' plus one to stop (goal = "stop")' if env.goal == "stop" else ""
        yield Conflict(
            f"environment.max_path = {env.max_path} cannot be solved within environment.max_turns = "
            f"{env.max_turns}: it takes {env.max_path} moves{stop}; "
            f"lower max_path or raise max_turns to at least {turns}",
            ("environment.max_path", "environment.max_turns", "environment.goal"),
        )


def _lengths(recipe: Recipe) -> Iterator[Conflict]:
    rollout, training = recipe.rollout, recipe.training
    if rollout.max_new_tokens >= rollout.max_tokens:
        yield Conflict(
            f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt within "
            f"rollout.max_tokens = {rollout.max_tokens}: lower max_new_tokens or raise max_tokens",
            ("rollout.max_new_tokens", "rollout.max_tokens"),
        )
    if training.tokens_per_microbatch < rollout.max_tokens:
        yield Conflict(
            f"training.tokens_per_microbatch = {training.tokens_per_microbatch} cannot hold a trajectory of "
            f"rollout.max_tokens = {rollout.max_tokens}: raise tokens_per_microbatch or lower max_tokens",
            ("training.tokens_per_microbatch", "rollout.max_tokens"),
        )


def _batches(recipe: Recipe) -> Iterator[Conflict]:
    prompts, group = recipe.training.prompts_per_step, recipe.algorithm.group_size
    parts = recipe.training.minibatches
    keys = ("training.minibatches", "training.prompts_per_step", "algorithm.group_size")
    if (prompts * group) % parts:
        yield Conflict(
            f"training.minibatches = {parts} does not divide the {prompts * group} trajectories of a step "
            f"(training.prompts_per_step = {prompts} times algorithm.group_size = {group}): "
            f"choose {_divisor_below(prompts * group, parts)} minibatches or another prompts_per_step",
            keys,
        )
    ranks = recipe.runtime.nodes * recipe.runtime.workers_per_node
    rank_keys = ("runtime.kind", "runtime.nodes", "runtime.workers_per_node")
    # Clew's own workers fill uneven parts up with zero-weight dummies; SkyRL drops prompts instead.
    if recipe.runtime.kind == "ray" and prompts * group // parts < ranks:
        yield Conflict(
            f"training.minibatches = {parts} leaves {prompts * group // parts} trajectories in a minibatch (of "
            f"training.prompts_per_step = {prompts} times algorithm.group_size = {group}) for {ranks} policy workers "
            "(runtime.nodes times runtime.workers_per_node), less than one each: "
            "choose fewer minibatches, fewer workers or a larger prompts_per_step",
            (*keys, *rank_keys),
        )
    if recipe.runtime.kind != "skyrl":
        return
    if prompts % ranks:
        yield Conflict(
            f"training.prompts_per_step = {prompts} is no multiple of the {ranks} SkyRL workers "
            f"(runtime.nodes times runtime.workers_per_node): choose {-(-prompts // ranks) * ranks}",
            ("training.prompts_per_step", *rank_keys),
        )
    if prompts % parts or (prompts // parts * group) % ranks:
        yield Conflict(
            f"training.minibatches = {parts} splits training.prompts_per_step = {prompts} unevenly: "
            f"SkyRL needs whole prompts in a minibatch and as many trajectories on each of {ranks} workers; "
            "choose other minibatches or another prompts_per_step",
            (*keys, *rank_keys),
        )


def _divisor_below(number: int, start: int) -> int:
    return next(n for n in range(min(start, number), 0, -1) if number % n == 0)


def _runtime(recipe: Recipe) -> Iterator[Conflict]:
    runtime = recipe.runtime
    if runtime.kind != "local":
        devices = runtime.nodes * runtime.workers_per_node
        if runtime.colocate and runtime.engines > devices:
            yield Conflict(
                f"runtime.engines = {runtime.engines} is more than the {devices} devices that runtime.colocate = true "
                f"has them share with policy workers (runtime.nodes = {runtime.nodes} times runtime.workers_per_node = "
                f"{runtime.workers_per_node}): choose at most {devices} engines, or runtime.colocate = false",
                ("runtime.engines", "runtime.colocate", "runtime.nodes", "runtime.workers_per_node"),
            )
        return
    for key in ("nodes", "workers_per_node", "engines"):
        count = getattr(runtime, key)
        if count != 1:
            yield Conflict(
                f'runtime.{key} = {count} needs a cluster, but runtime.kind = "local" runs in this process: '
                f'set runtime.kind = "ray" or runtime.{key} = 1',
                (f"runtime.{key}", "runtime.kind"),
            )


def _cluster(recipe: Recipe) -> Iterator[Conflict]:
    cluster = recipe.cluster
    if cluster.shm_gib >= cluster.worker_memory_gib:
        yield Conflict(
            f"cluster.shm_gib = {cluster.shm_gib} is part of cluster.worker_memory_gib = {cluster.worker_memory_gib} "
            "and leaves nothing of it: lower shm_gib or raise worker_memory_gib",
            ("cluster.shm_gib", "cluster.worker_memory_gib"),
        )
    if cluster.storage_gib != 1200 and cluster.storage_gib % 2400:
        yield Conflict(
            f"cluster.storage_gib = {cluster.storage_gib} is no size that FSx for Lustre has: choose 1200, or "
            f"{-(-cluster.storage_gib // 2400) * 2400}",
            ("cluster.storage_gib",),
        )
