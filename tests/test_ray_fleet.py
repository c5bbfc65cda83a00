"""Engines on a real local Ray cluster: every episode is played, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import ROOT
from slow_env import DeadlyMaze, HangingMaze, SlowMaze, StampedMaze

from clew.agent.ledger import StopReason, Trajectory
from clew.checkpoint import DamagedCheckpoint, write_directory
from clew.envs.base import ImageEnv
from clew.envs.maze_env import MazeEnv
from clew.errors import UserError
from clew.policy.adapter import Adapter, StoredAdapter, attach_lora, current_adapter, write_adapter
from clew.policy.model import load_model, load_processor
from clew.policy.paths import resolve_model_path
from clew.policy.vision import FeatureCache
from clew.recipe import Recipe, load_recipe
from clew.rollout.engine import Sampling
from clew.rollout.episodes import Limits, Player
from clew.rollout.rollouts import LocalRollouts
from clew.runtime import engine_fleet
from clew.runtime.cluster import _Actors, _reserve
from clew.runtime.devices import plan_devices
from clew.runtime.engine_fleet import RayRollouts
from clew.runtime.engine_workers import FEEDING, EngineWorker
from clew.runtime.placement import place

SETTINGS: dict[str, Any] = {"size": (4, 6), "min_path": 7, "max_path": 12, "max_turns": 15}
TASKS = [MazeEnv(**SETTINGS).task(seed) for seed in range(12)]
ATTEMPTS = [(task, sample) for task in TASKS for sample in range(2)]
SAMPLING = Sampling(1.0, 8)
LIMITS = Limits(1024, deadline_s=300)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(
        "laptop", ["runtime.kind=ray", "runtime.threads=1", "runtime.engines=2", "runtime.colocate=false"]
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield
    ray.shutdown()


class Fleet:
    """Two real engines, and what is said of them."""

    def __init__(self, recipe: Recipe) -> None:
        processor = load_processor(resolve_model_path(recipe.model))
        self.notes: list[str] = []
        self.needed: list[set[str]] = []
        self.queue: list[tuple[int, int]] = []
        path = os.pathsep.join([str(Path(__file__).parent), str(ROOT / "src")])  # for the environments of these tests
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        options = {"num_cpus": 0.01, "runtime_env": {"env_vars": variables}}
        actor = ray.remote(**options, concurrency_groups={FEEDING: 1})(EngineWorker)
        self.rollouts = RayRollouts(
            lambda index: actor.remote(recipe, "cpu", 1, False),
            2,
            Player(processor.template, processor.patcher),
            1,
            self.notes.append,
            lambda: None,
            self.needed.append,
            lambda waiting, playing: self.queue.append((waiting, playing)),
        )
        self.rollouts.start()

    @property
    def pids(self) -> list[int]:
        return [engine.where.pid for engine in self.rollouts.engines if engine.where]


@pytest.fixture(scope="module")
def fleet(cluster: None, recipe: Recipe) -> Fleet:
    return Fleet(recipe)


@pytest.fixture(autouse=True)
def quiet(fleet: Fleet) -> None:
    fleet.notes.clear()
    fleet.needed.clear()
    fleet.queue.clear()


@pytest.fixture(scope="module")
def adapters(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Adapter, StoredAdapter]]:
    """Two versions that differ from the base model and from each other, as they are and as they are stored."""
    import torch

    vlm = load_model(resolve_model_path(recipe.model))
    policy = attach_lora(vlm, 4, 8, 0.0)
    found = []
    for step in (1, 2):
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.03 * step)
        adapter = current_adapter(policy, step)
        folder = tmp_path_factory.mktemp("sync") / adapter.name
        write_directory(folder, partial(write_adapter, adapter), {})
        found.append((adapter, StoredAdapter(adapter.name, folder)))
    return found


@pytest.fixture(scope="module")
def local(recipe: Recipe) -> LocalRollouts:
    vlm = load_model(resolve_model_path(recipe.model))
    return LocalRollouts.of(vlm, FeatureCache(vlm.model.model.visual, vlm.patcher))


def play(rollouts: RayRollouts | LocalRollouts, make_env: Any = None, limits: Limits = LIMITS) -> list[Trajectory]:
    return rollouts.play(make_env or partial(MazeEnv, **SETTINGS), ATTEMPTS, SAMPLING, limits, ("t", 1))


def facts(trajectory: Trajectory) -> tuple[Any, ...]:
    return trajectory.task, trajectory.sample, trajectory.token_ids, trajectory.sampled, trajectory.stop_reason


def same(found: list[Trajectory], expected: list[Trajectory]) -> int:
    """How many episodes are the same token by token."""
    return sum(facts(a) == facts(b) for a, b in zip(found, expected, strict=True))


def test_two_engines_play_what_one_in_this_process_plays(
    fleet: Fleet, local: LocalRollouts, adapters: list[tuple[Adapter, StoredAdapter]]
) -> None:
    """Draws depend on task, sample and turn, never on the engine: also under one adapter after another."""
    for version in (None, *adapters):
        local.load(version[0] if version else None)
        fleet.rollouts.load(version[1] if version else None)
        expected, found = play(local), play(fleet.rollouts)
        assert same(found, expected) == len(ATTEMPTS)
        assert {t.policy_version for t in found} == {version[1].name if version else "base"}
        for a, b in zip(found, expected, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)
            assert all((x.frame == y.frame).all() for x, y in zip(a.turns, b.turns, strict=True))
    names = [stored.name for _, stored in adapters]
    assert fleet.needed == [set(), {names[0]}, set(names)], "the version before stays until the next is loaded"
    assert fleet.notes == []
    assert sum(fleet.queue[0]) == len(ATTEMPTS), "each waits or is played"
    assert max(map(sum, fleet.queue)) == len(ATTEMPTS)
    assert fleet.queue[-1] == (0, 0)


def test_both_engines_work_and_get_more_as_episodes_end(fleet: Fleet, tmp_path: Path) -> None:
    make: Any = partial(StampedMaze, tmp_path, **SETTINGS)
    narrow = Limits(1024, deadline_s=300, concurrent=3)
    fleet.rollouts.load(None)
    found = play(fleet.rollouts, make, narrow)
    assert {t.stop_reason for t in found} <= {StopReason.SUCCESS, StopReason.TURN_CAP}
    by_engine = Counter(path.name.partition("-")[0] for path in tmp_path.iterdir())
    assert set(by_engine) == {str(pid) for pid in fleet.pids}
    assert min(by_engine.values()) >= 4, by_engine


def kill_soon(pid: int, delay_s: float) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(delay_s), os.kill(pid, signal.SIGKILL)))
    thread.start()
    return thread


def test_a_killed_engine_costs_no_episode(
    fleet: Fleet, local: LocalRollouts, adapters: list[tuple[Adapter, StoredAdapter]]
) -> None:
    """Its episodes are played again elsewhere with the same draws; the engine in its place has the right adapter."""
    adapter, stored = adapters[0]
    local.load(adapter)
    expected = play(local)
    fleet.rollouts.load(stored)
    before = fleet.pids
    slow: Any = partial(SlowMaze, 0.02, **SETTINGS)
    killer = kill_soon(before[0], 1.0)
    found = play(fleet.rollouts, slow)
    killer.join()
    assert same(found, expected) == len(ATTEMPTS)
    assert {t.policy_version for t in found} == {stored.name}
    (note,) = fleet.notes
    assert note.startswith("engine 0 died (") and "unfinished episodes are played again" in note
    again = play(fleet.rollouts)  # waits for nobody: the new engine joins when it is ready
    assert same(again, expected) == len(ATTEMPTS)
    fleet.rollouts.load(stored)
    assert fleet.pids[1] == before[1] and fleet.pids[0] != before[0]
    make: Any = partial(MazeEnv, **SETTINGS)
    assert same(play(fleet.rollouts, make), expected) == len(ATTEMPTS)


def test_both_engines_killed_at_once(fleet: Fleet, local: LocalRollouts) -> None:
    local.load(None)
    fleet.rollouts.load(None)
    expected = play(local)
    killers = [kill_soon(pid, 0.8) for pid in fleet.pids]
    found = play(fleet.rollouts, partial(SlowMaze, 0.02, **SETTINGS))
    for killer in killers:
        killer.join()
    assert same(found, expected) == len(ATTEMPTS)
    assert len(fleet.notes) == 2


def test_an_episode_that_kills_its_engines_is_found_and_typed_and_costs_no_other(fleet: Fleet) -> None:
    victim = TASKS[5].seed
    fleet.rollouts.load(None)
    make: Any = partial(DeadlyMaze, victim, **SETTINGS)
    attempts = [(task, 0) for task in TASKS[:8]]
    found = fleet.rollouts.play(make, attempts, SAMPLING, LIMITS, ("t", 1))
    (lost,) = [t for t in found if t.stop_reason is StopReason.ENGINE_LOST]
    assert lost.task.seed == victim and lost.stop_reason.infrastructure and not lost.turns
    assert len(found) == 8 and len(fleet.notes) == 3, "twice in company, once alone"
    assert [t.task.seed for t in found] == [task.seed for task in TASKS[:8]]


def test_a_hanging_episode_meets_its_deadline_and_holds_up_nobody(fleet: Fleet) -> None:
    victim = TASKS[3].seed
    fleet.rollouts.load(None)
    make: Any = partial(HangingMaze, victim, **SETTINGS)
    began = time.monotonic()
    found = play(fleet.rollouts, make, Limits(1024, deadline_s=12))
    assert time.monotonic() - began < 60
    assert {t.task.seed for t in found if t.stop_reason is StopReason.DEADLINE} == {victim}
    assert sum(t.stop_reason is StopReason.DEADLINE for t in found) == 2
    assert fleet.notes == [], "an engine with a stuck environment goes on"


def test_an_engine_that_freezes_takes_no_other_with_it(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken for dead some time after the deadline; the others are given time for what they are handed then."""
    monkeypatch.setattr(engine_fleet, "_SILENCE_S", 4.0)
    fleet.rollouts.load(None)
    before = fleet.pids
    freezer = threading.Timer(1.0, os.kill, [before[0], signal.SIGSTOP])
    freezer.start()
    found = play(fleet.rollouts, partial(SlowMaze, 0.2, **SETTINGS), Limits(1024, deadline_s=8))
    assert len(found) == len(ATTEMPTS) and StopReason.ENGINE_LOST not in {t.stop_reason for t in found}
    assert any(t.stop_reason is StopReason.DEADLINE for t in found)
    (note,) = fleet.notes
    assert note.startswith("engine 0 died (TimeoutError: no answer 4 s after its deadline)")
    fleet.rollouts.load(None)
    assert fleet.pids[1] == before[1] and fleet.pids[0] != before[0]


def test_policy_workers_that_share_gpus_with_engines_have_one_each(cluster: None) -> None:
    recipe = load_recipe("gpu", ["runtime.workers_per_node=2", "runtime.engines=2"])
    placement = place(recipe)
    plan = replace(plan_devices(recipe, placement, 2, 2), worker_cpus=0.1)
    group = _reserve(placement, plan)

    class Worker:
        def gpus(self) -> list[Any]:
            return ray.get_gpu_ids()

    made = _Actors(recipe, placement, plan, group)
    make = [made._options(0, share, 1) for share in 2 * [plan.policy_share] + 2 * [plan.engine_share]]
    workers = []
    for options in make:
        workers.append(ray.remote(Worker).options(**options).remote())
        ray.get(workers[-1].gpus.remote())
    policies, engines = ([ray.get(worker.gpus.remote()) for worker in part] for part in (workers[:2], workers[2:]))
    ray.util.remove_placement_group(group)
    assert sorted(policies) == sorted(engines) and policies[0] != policies[1]


def test_a_damaged_version_is_refused_and_named(
    fleet: Fleet, adapters: list[tuple[Adapter, StoredAdapter]], tmp_path: Path
) -> None:
    adapter, _ = adapters[0]
    folder = tmp_path / "version"
    write_directory(folder, partial(write_adapter, adapter), {})
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(DamagedCheckpoint, match=r"adapter_model\.safetensors"):
        fleet.rollouts.load(StoredAdapter("step-000009-a1-00000000", folder))
    fleet.rollouts.load(None)


def test_what_the_recipe_got_wrong_is_the_users_to_mend(fleet: Fleet) -> None:
    def refuse() -> ImageEnv:
        raise UserError("[environment]: no such thing")

    with pytest.raises(UserError, match="no such thing"):
        play(fleet.rollouts, refuse)
