"""The Ray runtime: finds or starts a cluster, places policy workers and engines on it, and takes them down again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from clew.checkpoint import write_file_atomic
from clew.checkpoint.staging import discard, staging_path
from clew.errors import RunFailed, StorageError, UserError
from clew.policy.model import load_processor
from clew.policy.paths import resolve_model_path
from clew.recipe import WARM_START, Recipe
from clew.rollout.episodes import Player
from clew.runtime.devices import DevicePlan, Whereabouts, plan_devices
from clew.runtime.engine_fleet import RayRollouts
from clew.runtime.engine_workers import FEEDING, EngineWorker
from clew.runtime.placement import Placement, place
from clew.runtime.policy_workers import PolicyWorker, RayPolicy
from clew.runtime.process import MACHINES_BACK_S, cores, in_job, in_job_s
from clew.runtime.ray_metrics import RayMetrics
from clew.runtime.run_directory import RECIPE
from clew.training.run_state import next_session

log = logging.getLogger(__name__)
SYNC, WORKERS = "sync", "workers.json"
_PLACED_WITHIN_S = 600.0


@contextlib.contextmanager
def cluster(recipe: Recipe, run_dir: Path, note: Callable[[str], None]) -> Iterator[tuple[RayPolicy, RayRollouts]]:
    """Policy workers and engines of a run, for as long as the context lasts.

    Adapter versions are published below RUN/sync; those that no engine may still need are removed.

    Raises:
        UserError: there is no such cluster, or it is too small.
        RunFailed: workers die at the start; or a job finds the cluster too small on which it had its workers before,
            so that machines are lost and another attempt may find them.
    """
    run_dir, recipe = Path(os.path.abspath(run_dir)), _seen_from_anywhere(recipe)
    placement = place(recipe)
    with _connected(recipe):
        lacking = RunFailed if in_job() and (run_dir / WORKERS).is_file() else UserError
        machines = _machines(placement, in_job_s(MACHINES_BACK_S), note, lacking)
        gpus, cpus = sum(m.get("GPU", 0.0) for m in machines), min(m["CPU"] for m in machines)
        plan = plan_devices(recipe, placement, gpus, cpus)
        if plan.device == "cuda":
            _check_gpus(placement, machines, lacking)
        group = _reserve(placement, plan, lacking)
        try:
            actors = _Actors(recipe, placement, plan, group)
            sync = run_dir / SYNC
            processor = load_processor(resolve_model_path(recipe.model))
            ranks: list[Whereabouts] = []

            def record() -> None:
                """Who works where now, for whoever looks after the machines."""
                engines = [engine.where._asdict() if engine.where else None for engine in rollouts.engines]
                found = {"policy": [where._asdict() for where in ranks], "engines": engines}
                try:
                    write_file_atomic(run_dir / WORKERS, json.dumps(found, indent=1) + "\n")
                except StorageError as refusal:  # nothing depends on it
                    note(f"{WORKERS} is out of date: {refusal}")

            def before_update() -> None:
                if plan.sleep:
                    rollouts.sleep()

            policy = RayPolicy(
                [actors.policy(rank) for rank in range(len(placement.ranks))],
                recipe,
                sync,
                next_session(run_dir),
                before_update,
                note,
            )
            # Before any engine: each worker is to have a device of its own, and vLLM measures what is left of it.
            ranks += policy.start(run_dir / RECIPE)
            rollouts = RayRollouts(
                actors.engine,
                recipe.runtime.engines,
                Player(processor.template, processor.patcher),
                len(placement.devices) if plan.device == "cuda" else len(placement.nodes),
                note,
                record,
                lambda needed: _prune(sync, needed),
                RayMetrics(run_dir).queue,
            )
            rollouts.start()
            yield policy, rollouts
        finally:
            remove_placement_group(group)


def _seen_from_anywhere(recipe: Recipe) -> Recipe:
    """The recipe with the whole path of its model folder: workers have working directories of their own."""
    model = recipe.model
    if model.path == WARM_START or not Path(model.path).expanduser().exists():
        return recipe
    whole = model.model_copy(update={"path": os.path.abspath(Path(model.path).expanduser())})
    return recipe.model_copy(update={"model": whole})


@contextlib.contextmanager
def _connected(recipe: Recipe) -> Iterator[None]:
    """A connection to the recipe's cluster, or to one of this process's own."""
    address = recipe.runtime.address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address:
        try:
            _knock(address)
            ray.init(address=address, **options)
        except (OSError, RuntimeError, ValueError) as error:
            key = "runtime.address" if recipe.runtime.address else "RAY_ADDRESS"
            raise UserError(
                f"{key}: there is no Ray cluster at {address} ({error}); start one with `ray start`"
            ) from error
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it listens on this machine only; no token file at home
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would let any other program halt the run
        ray.init(address="local", num_cpus=max(cores(), 1), include_dashboard=False, **options)
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Finds out at once whether anybody listens at HOST:PORT; Ray itself would try for minutes."""
    if (match := re.fullmatch(r"([^/:]+):(\d{1,5})", address)) is not None:
        socket.create_connection((match[1], int(match[2])), timeout=10).close()


def _machines(
    placement: Placement, patience_s: float, note: Callable[[str], None], lacking: type[Exception]
) -> list[dict[str, float]]:
    """What each machine that takes work has.

    Args:
        patience_s: seconds for which machines that are missing are waited for.
        lacking: raised when there are fewer than the recipe places workers on.
    """
    needed, until, told = len(placement.nodes), time.monotonic() + patience_s, False
    while True:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        if len(machines) >= needed:
            return machines
        if time.monotonic() >= until:
            raise lacking(
                f"runtime.nodes = {needed} but the Ray cluster has {len(machines)} that take work: "
                "add machines, or lower runtime.nodes"
            )
        if not told:
            note(
                f"{len(machines)} of {needed} machines are there; waiting for the rest, up to {patience_s / 60:.0f} min"
            )
        told = True
        time.sleep(1)


def _check_gpus(placement: Placement, machines: list[dict[str, float]], lacking: type[Exception]) -> None:
    """Refuses at once what would wait for GPUs that no machine has."""
    needed = max(len(node.devices) for node in placement.nodes)
    counts = sorted((int(machine.get("GPU", 0)) for machine in machines), reverse=True)
    if counts[len(placement.nodes) - 1] < needed:
        raise lacking(
            f"[runtime] places work on {needed} GPUs of each of {len(placement.nodes)} machines, but those of the Ray "
            f"cluster have {', '.join(map(str, counts))}: lower runtime.workers_per_node or engines, or set "
            'model.device = "cpu"'
        )


def _reserve(placement: Placement, plan: DevicePlan, lacking: type[Exception] = UserError) -> PlacementGroup:
    """One bundle a node, with all that is placed on it; raises ``lacking`` if the cluster has no room for them."""
    bundles = []
    for node in placement.nodes:
        bundle = {"CPU": plan.worker_cpus * (len(node.ranks) + len(node.engines))}
        if plan.device == "cuda":
            bundle["GPU"] = float(len(node.devices))
        bundles.append(bundle)
    group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "PACK")
    try:
        ray.get(group.ready(), timeout=_PLACED_WITHIN_S)
    except GetTimeoutError as error:
        remove_placement_group(group)
        available = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
        raise lacking(
            f"[runtime]: the Ray cluster has no room for {bundles} (one bundle a machine; it has {available} left): "
            "wait for what runs there, add machines, or lower runtime.nodes, workers_per_node or engines"
        ) from error
    return group


class _Actors:
    """Starts actors in their places."""

    def __init__(self, recipe: Recipe, placement: Placement, plan: DevicePlan, group: PlacementGroup) -> None:
        self.recipe, self.placement, self.plan, self.group = recipe, placement, plan, group

    def policy(self, rank: int) -> Any:
        """The policy worker of a rank."""
        options = self._options(self.placement.ranks[rank].node, self.plan.policy_share, self.plan.policy_threads)
        return (
            ray.remote(PolicyWorker)
            .options(**options)
            .remote(
                self.recipe,
                rank,
                len(self.placement.ranks),
                self.plan.device,
                self.plan.backend,
                self.plan.policy_threads,
            )
        )

    def engine(self, index: int) -> Any:
        """An engine by its number."""
        options = self._options(self.placement.engines[index].node, self.plan.engine_share, self.plan.engine_threads)
        options["concurrency_groups"] = {FEEDING: 1}
        made: Any = ray.remote(**options)(EngineWorker)
        return made.remote(self.recipe, self.plan.device, self.plan.engine_threads, self.plan.sleep)

    def _options(self, node: int, share: float, threads: int) -> dict[str, Any]:
        return {
            "num_cpus": self.plan.worker_cpus,
            "num_gpus": share,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=node),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}},
        }


def _prune(sync: Path, needed: set[str]) -> None:
    """Removes the adapter versions that no engine may still need."""
    for folder in sync.iterdir() if sync.is_dir() else ():
        if folder.name.startswith("step-") and folder.name not in needed:
            doomed = staging_path(folder)  # renamed first: a name never shows a partial version
            try:
                folder.rename(doomed)
            except OSError as error:  # what is left takes room and does no other harm
                log.warning("old adapter version %s could not be removed: %s", folder, error)
            else:
                discard(doomed)
