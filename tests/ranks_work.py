"""What ranks do in the tests of the sharded policy; ``ranks_helper`` makes the processes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ranks_helper import adapter_of, put_back, set_adapter, whole
from torch import Tensor
from torch.distributed.tensor import DTensor

from clew.checkpoint import CheckpointStore
from clew.errors import UserError
from clew.policy.adapter import Adapter
from clew.recipe import AlgorithmTable, Recipe, TrainingTable, parse_recipe
from clew.training.learner import Learner
from clew.training.ranks import Ranks
from clew.training.run_state import RunState
from clew.training.update import Sample, Updater

RECIPE = """
name = "sharded"
[model]
path = "{model}"
[model.lora]
rank = 4
alpha = 8
[environment]
size = 3
[rollout]
temperature = 0.9
max_new_tokens = 8
max_tokens = 120
[training]
steps = 4
prompts_per_step = 2
learning_rate = 0.01
warmup_steps = 1
schedule = "linear"
tokens_per_microbatch = 120
[checkpoint]
interval = 1
"""

Batch = tuple[list[Sample], list[bool]]


def recipe(model: Path, *overrides: str) -> Recipe:
    """A recipe on a model folder."""
    return parse_recipe(RECIPE.format(model=model), source="test.toml", overrides=overrides)


# --- updates ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call of ``Updater.update`` from fixed weights.

    Attributes:
        encode_batch: frames that the vision tower encodes at once.
        sgd: plain steps; Adam hides a wrong scale and blows up rounding.
    """

    algorithm: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    batch: Batch = ([], [])
    encode_batch: int = 256
    sgd: bool = True


@dataclass(frozen=True)
class Outcome:
    """What an update made.

    Attributes:
        gradients: of the last minibatch, whole; none where there was no update.
        weights: the adapter afterwards, whole.
        tower_runs: forwards of the vision tower on this rank.
        layer_runs: forwards of a decoder layer on this rank.
        parts: this rank's micro-batches with weight, over the minibatches of one epoch.
        state_types: dtypes of the optimizer's states.
        at_rest: whether every sharded parameter was back in shards after the last forward.
    """

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    tower_runs: int
    layer_runs: int
    parts: int
    state_types: set[torch.dtype]
    at_rest: bool


@contextlib.contextmanager
def counted(module: torch.nn.Module) -> Iterator[list[int]]:
    runs = [0]

    def count(*_: Any) -> None:
        runs[0] += 1

    hook = module.register_forward_pre_hook(count)
    try:
        yield runs
    finally:
        hook.remove()


def run_cases(ranks: Ranks, made: Recipe, cases: dict[str, Case]) -> dict[str, Outcome]:
    """Each case on one model, from the same weights."""
    learner = Learner(made, ranks)
    set_adapter(learner)
    start = adapter_of(learner)
    found = {}
    for name, case in cases.items():
        put_back(learner, start)
        found[name] = _run_case(learner, case)
    return found


def _run_case(learner: Learner, case: Case) -> Outcome:
    table = {"steps": 9, "prompts_per_step": 2, "learning_rate": 0.5, "max_grad_norm": 1e9, **case.training}
    updater = Updater(
        learner.vlm,
        learner.policy,
        learner.features,
        AlgorithmTable(**case.algorithm),
        TrainingTable(**table),
        learner.recipe.rollout.temperature,
        learner.recipe.rollout.max_tokens,
        case.algorithm.get("tis_cap"),
        learner.ranks,
    )
    if case.sgd:
        updater.optimizer = torch.optim.SGD(updater.parameters, lr=1.0)  # type: ignore[assignment]
    learner.features.clear()
    learner.features.batch = case.encode_batch
    for parameter in updater.parameters:
        parameter.grad = None
    base = learner.vlm.model.model
    # Inside a layer: a hook on a sharded module itself would not run again in recomputation.
    with counted(base.visual.patch_embed) as tower, counted(base.language_model.layers[0].input_layernorm) as layer:
        real = []
        split = updater._minibatch

        def minibatch(*arguments: Any) -> Any:
            chunk = split(*arguments)
            real.append(chunk.real)
            return chunk

        with mock.patch.object(updater, "_minibatch", minibatch):
            metrics = updater.update(*case.batch, step=1)
    named = [(n, p) for n, p in learner.policy.named_parameters() if p.requires_grad and p.grad is not None]
    gradients = {name: whole(p.grad) for name, p in named}
    weights = adapter_of(learner)
    states = [v.dtype for s in updater.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    learner.features.clear()  # each rank has encoded other frames: from here on they do the same
    updater._score_all([case.batch[0][:1]])  # a forward with no backward after it
    blocks = [*base.language_model.layers, *base.visual.blocks]
    at_rest = all(isinstance(p, DTensor) for block in blocks for p in block.parameters())
    return Outcome(metrics, gradients, weights, tower[0], layer[0], sum(real), set(states), at_rest)


# --- runs and their checkpoints --------------------------------------------------------------------------

FACTS = {"base_sha256": "0" * 64}


@dataclass(frozen=True)
class Run:
    """What a run came to.

    Attributes:
        restored: step, data position and evaluations that a checkpoint brought back, and the adapter's hash then.
        adapter: at the end.
        metrics: of each update.
    """

    restored: tuple[int, int, dict[int, Any], str]
    adapter: Adapter
    metrics: list[dict[str, float]]


def train(ranks: Ranks, made: Recipe, run_dir: Path, batches: list[Batch], until: int) -> Run:
    """Goes on from the run directory's newest checkpoint to step ``until`` and saves that step."""
    learner = Learner(made, ranks)
    state = RunState(made, run_dir, learner)
    if state.store.latest() is None:
        set_adapter(learner)
    state.restore()
    restored = (state.step, state.position, state.evaluations, learner.publish(state.step).content_hash)
    metrics = []
    for step in range(state.step + 1, until + 1):
        metrics.append(learner.update(*batches[step - 1], step))
        state.step, state.position = step, 1000 + 7 * step
        state.evaluations = {**state.evaluations, step: {"suite": "heldout", "solved": step, "total": 9}}
    state.save()
    return Run(restored, learner.publish(state.step), metrics)


def several(ranks: Ranks, jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Several works, one after another, on one group."""
    return [work(ranks, *arguments) for work, arguments in jobs]


def export(ranks: Ranks, made: Recipe, folder: Path, batch: Batch) -> tuple[Adapter, dict[str, float], tuple[int, int]]:
    """Exports the adapter before its first update, then updates it.

    Returns:
        The adapter, the update's metrics, and how many weights this rank holds whole and how many in shards.
    """
    learner = Learner(made, ranks)
    set_adapter(learner)
    card = {"base_model": made.model.path, "base_sha256": "0" * 64, "step": 0, "recipe": made.name, "seed": 0}
    learner.export(folder, {**card, "environment": {}})
    adapter = learner.publish(0)
    metrics = learner.update(*batch, 1)
    held = list(learner.vlm.model.parameters())
    shards = sum(p.to_local().numel() for p in held if isinstance(p, DTensor))
    return adapter, metrics, (sum(p.numel() for p in held if not isinstance(p, DTensor)), shards)


def save_where_it_does_not_fit(
    ranks: Ranks, made: Recipe, root: Path, limited: int | None, seconds: float
) -> tuple[Exception | None, list[str], str]:
    """Saves step 1, then step 2 without room for it, then, with room again, step 2.

    Args:
        limited: the rank whose files may have 1,000 bytes at most; None: the disk itself is filled up.
        seconds: a save without room must end within.

    Returns:
        The error without room, what this rank saw there then, and the hash of the adapter that was saved at last.
    """
    learner = Learner(made, ranks)
    store = CheckpointStore(root, None)
    learner.save(store, 1, "{}", FACTS)
    set_adapter(learner)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ballast = root.parent / "ballast"
    if ranks.rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    elif limited is None and ranks.rank == 0:
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    began, failure = time.monotonic(), None
    try:
        learner.save(store, 2, "{}", FACTS)
    except Exception as error:
        failure = error
    assert time.monotonic() - began < seconds
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    there = sorted(path.name for path in root.iterdir())
    ranks.from_first(None)  # nobody goes on before all have looked
    if ranks.rank == 0:
        ballast.unlink(missing_ok=True)
    learner.save(store, 2, "{}", FACTS)
    learner.save(store, 2, "{}", FACTS)  # as a retry does: the same again is no other content
    return failure, there, learner.publish(2).content_hash


def save_where_a_file_lies(ranks: Ranks, made: Recipe, root: Path) -> str | None:
    """Saves below a path that is a file, then, that removed, once more; what was wrong, if anything."""
    learner = Learner(made, ranks)
    store = CheckpointStore(root, None)
    failure = None
    try:
        learner.save(store, 1, "{}", FACTS)
    except UserError as error:
        failure = str(error)
    ranks.from_first(None)
    if ranks.rank == 0:
        root.unlink()
    learner.save(store, 1, "{}", FACTS)
    return failure


def save_and_die(ranks: Ranks, made: Recipe, root: Path, victim: int, place: str) -> None:
    """Saves step 1; while step 2 is saved, one rank is killed (SIGKILL) where it would call ``place``."""
    learner = Learner(made, ranks)
    store = CheckpointStore(root, None)
    learner.save(store, 1, "{}", FACTS)
    set_adapter(learner)
    if ranks.rank == victim:
        mock.patch(place, side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)).start()
    learner.save(store, 2, "{}", FACTS)
