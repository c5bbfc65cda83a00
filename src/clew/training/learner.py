"""The policy in training: one rank of it, or the whole where there is only one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from clew.checkpoint import CheckpointStore
from clew.envs.registry import make_env
from clew.errors import UserError
from clew.evaluation.suites import environment_settings
from clew.policy.adapter import Adapter, attach_lora, current_adapter
from clew.policy.export import adapter_effect, export_adapter
from clew.policy.model import VisionLanguageModel, load_model
from clew.policy.paths import resolve_device, resolve_dtype, resolve_model_path
from clew.policy.sharding import shard
from clew.policy.vision import FeatureCache
from clew.recipe import Recipe
from clew.rollout.engine import derive_seed
from clew.training.importance import tis_cap
from clew.training.ranks import ALONE, Ranks
from clew.training.update import Sample, Updater, deterministic_dropout, no_update_metrics

SHARDS, STATE = "policy", "state.json"
_TRAINED = StateDictOptions(ignore_frozen_params=True)


class Learner:
    """Adapter, optimizer and base model on one rank.

    With several ranks the model is sharded over them (FSDP2), and every method is a collective: all ranks call it with
    the same arguments, rank 0 alone writes whole files and has whole adapters.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks = ALONE, device: str | None = None) -> None:
        self.recipe, self.ranks = recipe, ranks
        dtype, device = resolve_dtype(recipe), device or resolve_device(recipe)
        self.vlm: VisionLanguageModel = load_model(
            resolve_model_path(recipe.model),
            dtype if ranks.size == 1 else torch.float32,
            device if ranks.size == 1 else "cpu",
        )
        lora = recipe.model.lora
        self.policy = attach_lora(
            self.vlm, lora.rank, lora.alpha, lora.dropout, lora.target, lora.vision, recipe.training.seed
        )
        if recipe.training.gradient_checkpointing:
            self.vlm.model.gradient_checkpointing_enable({"use_reentrant": False})
        if ranks.size > 1:
            shard(self.vlm, ranks.size, dtype, device)
        self.features = FeatureCache(self.vlm.model.model.visual, self.vlm.patcher)
        self.updater = Updater(
            self.vlm,
            self.policy,
            self.features,
            recipe.algorithm,
            recipe.training,
            recipe.rollout.temperature,
            recipe.rollout.max_tokens,
            tis_cap(recipe),
            ranks,
        )

    def restore(self, folder: Path) -> None:
        """Loads what ``save`` wrote, on however many ranks that was.

        Raises:
            UserError: the checkpoint belongs to another LoRA configuration.
        """
        reader = FileSystemReader(folder / SHARDS)
        saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
        state = self._state(with_optimizer=any(key.startswith("optimizer.") for key in saved))
        own = {f"adapter.{name}": tensor.shape for name, tensor in state["adapter"].items()}
        if own != {key: meta.size for key, meta in saved.items() if key.startswith("adapter.")}:
            raise UserError(
                f"{folder}: its adapter has other names or shapes than this recipe's [model.lora]; use its own recipe"
            )
        with _reported_as_raised():
            dcp.load(state, storage_reader=reader, no_dist=self.ranks.size == 1)
        set_model_state_dict(self.policy, state["adapter"], options=StateDictOptions(strict=False))
        if "optimizer" in state:
            set_optimizer_state_dict(self.policy, self.updater.optimizer, state["optimizer"], options=_TRAINED)

    def update(self, samples: list[Sample], used: list[bool], step: int) -> dict[str, float]:
        """Learns from a step's samples; a step in which no group carries signal is a counted no-op."""
        if not any(used):
            return no_update_metrics(self.updater.learning_rate(step))
        own = [self.ranks.rank] if self.ranks.size > 1 else []  # ranks with other sequences drop other inputs
        with deterministic_dropout(derive_seed("update", self.recipe.training.seed, step, *own)):
            metrics = self.updater.update(samples, used, step)
        self.features.clear()
        return metrics

    def publish(self, step: int) -> Adapter:
        """The adapter as it is now, gathered from all ranks."""
        return current_adapter(self.policy, step)

    def export(self, folder: Path, card: dict[str, Any]) -> None:
        """Writes the current adapter, ready to serve, with a card (see ``export_adapter``)."""
        with contextlib.closing(make_env(self.recipe.environment.id, **environment_settings(self.recipe))) as env:
            effect = adapter_effect(self.vlm, self.policy, env)
        adapter = self.publish(card["step"])
        if self.ranks.rank == 0:
            export_adapter(adapter, folder, card, effect)

    def save(self, store: CheckpointStore, step: int, state: str, facts: dict[str, Any]) -> None:
        """Saves a checkpoint, whole or not at all: every rank its shards, and ``state`` (JSON) beside them.

        The frozen base is named by ``facts``, not stored again.

        Raises:
            UserError: the disk is full or closed to us; what was saved before is untouched.
        """
        announced = False

        def write(folder: Path) -> None:
            nonlocal announced
            announced = True
            self._write_shards(self.ranks.from_first(folder))
            (folder / STATE).write_text(state)

        if self.ranks.rank == 0:
            try:
                store.save(step, write, facts)
            finally:
                if not announced:  # the others must not wait for a folder that could not be made
                    self.ranks.from_first(None)
        else:
            folder: Path | None = self.ranks.from_first(None)
            if folder is not None:
                self._write_shards(folder)

    def _write_shards(self, folder: Path) -> None:
        state = self._state(with_optimizer=bool(self.updater.optimizer.state))
        with _reported_as_raised():
            dcp.save(state, storage_writer=_Writer(folder / SHARDS), no_dist=self.ranks.size == 1)

    def _state(self, with_optimizer: bool) -> dict[str, Any]:
        """Tensors by name (shards, where there are several ranks); an optimizer without state would be given one."""
        trained = {name for name, parameter in self.policy.named_parameters() if parameter.requires_grad}
        tensors = get_model_state_dict(self.policy, options=_TRAINED)
        # An output layer that is tied to the embeddings is frozen with them, and torch leaves out only one of the two.
        state: dict[str, Any] = {"adapter": {name: tensors[name] for name in tensors if name in trained}}
        if with_optimizer:
            state["optimizer"] = get_optimizer_state_dict(self.policy, self.updater.optimizer, options=_TRAINED)
        return state


class _Writer(FileSystemWriter):
    """Without the path and the random id that torch puts into the metadata: the same state gives the same bytes."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


@contextlib.contextmanager
def _reported_as_raised() -> Iterator[None]:
    """Raises on all ranks what went wrong on one, in place of torch's report of it, which is no ``Exception``."""
    try:
        yield
    except CheckpointException as report:
        raise next(iter(report.failures.values()))[0] from report
