"""A recipe as the configuration of SkyRL 0.4.0.

A value whose meaning SkyRL would change is refused (``fields``). Defaults of SkyRL's that differ from what a recipe
means are overridden, so the list is longer than the recipe.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clew.errors import UserError
from clew.evaluation.suites import longest_episode
from clew.recipe import Recipe
from clew.runtime.run_directory import file_name
from clew.runtime.skyrl.fields import refused, reported
from clew.runtime.skyrl.tasks import ENV_CLASS
from clew.training.importance import tis_cap

Value = str | int | float | bool | list[str] | list[float] | None

_YAML_WORDS = ("null", "none", "true", "false", "yes", "no", "on", "off", "y", "n", "inf", "nan")


@dataclass(frozen=True)
class Places:
    """Where a SkyRL run keeps its files: below the run directory, which all machines see."""

    run_dir: Path

    @property
    def checkpoints(self) -> Path:
        """SkyRL's ``ckpt_path``."""
        return self.run_dir / "checkpoints"

    @property
    def exports(self) -> Path:
        """SkyRL's ``export_path``."""
        return self.run_dir / "exports"

    @property
    def tasks(self) -> Path:
        """The data sets."""
        return self.run_dir / "tasks"

    @property
    def lora_sync(self) -> Path:
        """Adapters on their way to the engines."""
        return self.run_dir / "lora_sync"

    @property
    def logs(self) -> Path:
        """What SkyRL's workers and engines say."""
        return self.run_dir / "logs"


@dataclass(frozen=True)
class Translation:
    """What SkyRL is to be started with.

    Attributes:
        overrides: option of SkyRL (dotted) to its value.
        reported: lines about what has no counterpart, and about what SkyRL does otherwise.
    """

    overrides: dict[str, Value]
    reported: list[str]


def translate(recipe: Recipe, run_dir: Path, model: str) -> Translation:
    """Translates a recipe; needs neither SkyRL nor the model nor the environment.

    Args:
        run_dir: of the run; everything SkyRL writes goes below it.
        model: folder (or hub id) that SkyRL loads: SkyRL knows no subfolders or revisions.

    Raises:
        UserError: one line with every value whose meaning SkyRL would change, and the remedy.
    """
    places = Places(Path(os.path.abspath(run_dir)))
    if problems := list(refused(recipe, places.run_dir)):
        raise UserError('runtime.kind = "skyrl": ' + "; ".join(problems))
    overrides = {
        **_fixed(),
        **_files(places),
        **_model(recipe, model),
        **_rollout(recipe),
        **_algorithm(recipe),
        **_training(recipe),
        **_schedule(recipe),
        **_placement(recipe),
    }
    return Translation(overrides, list(reported(recipe)))


def shell_words(overrides: Mapping[str, Value]) -> list[str]:
    """``key=value`` for each override, sorted, quoted for a shell and read by SkyRL as the value it is."""
    return [shlex.quote(f"{key}={_text(value)}") for key, value in sorted(overrides.items())]


def _text(value: Value) -> str:
    # JSON is YAML, in which SkyRL reads values; a plain path or name needs no quotes there.
    plain = isinstance(value, str) and re.fullmatch(r"[/A-Za-z][\w/.-]*", value, re.ASCII)
    if isinstance(value, str) and plain and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


def _fixed() -> dict[str, Value]:
    """What no field of a recipe changes: how Clew's tasks are played, and SkyRL's defaults that mean something else."""
    return {
        "environment.env_class": ENV_CLASS,
        "trainer.strategy": "fsdp",
        "trainer.project_name": "clew",
        "trainer.logger": "console",
        "trainer.resume_mode": "latest",
        "trainer.dump_eval_results": True,
        # The model's positions are three-dimensional: SkyRL can't pack its sequences.
        "trainer.remove_microbatch_padding": False,
        "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95],
        "trainer.policy.model.lora.sync_mode": "disk",
        "trainer.algorithm.policy_loss_type": "regular",
        "trainer.algorithm.use_kl_in_reward": False,
        "generator.vision_language_generator": True,
        "generator.batched": False,
        "generator.use_conversation_multi_turn": True,
        "generator.eval_n_samples_per_prompt": 1,
        "generator.inference_engine.run_engines_locally": True,
        "generator.inference_engine.tensor_parallel_size": 1,
        "generator.inference_engine.enforce_eager": False,
        # vLLM's own default are log-probabilities before the temperature; SkyRL's trainer divides by it.
        "generator.inference_engine.engine_init_kwargs.logprobs_mode": "processed_logprobs",
    }


def _files(places: Places) -> dict[str, Value]:
    return {
        "data.train_data": [str(places.tasks / "train.parquet")],
        "data.val_data": [str(places.tasks / "heldout.parquet")],
        "trainer.ckpt_path": str(places.checkpoints),
        "trainer.export_path": str(places.exports),
        "trainer.log_path": str(places.logs),
        "trainer.policy.model.lora.lora_sync_path": str(places.lora_sync),
    }


def _model(recipe: Recipe, model: str) -> dict[str, Value]:
    lora, prefix = recipe.model.lora, "trainer.policy.model"
    return {
        f"{prefix}.path": model,
        f"{prefix}.lora.rank": lora.rank,
        f"{prefix}.lora.alpha": int(lora.alpha),
        f"{prefix}.lora.dropout": lora.dropout,
        f"{prefix}.lora.target_modules": lora.target if isinstance(lora.target, str) else list(lora.target),
        # Without it, SkyRL adapts the vision tower too, and vLLM ignores that part.
        f"{prefix}.lora.exclude_modules": ".*visual.*",
        "generator.inference_engine.model_dtype": recipe.model.dtype,
    }


def _rollout(recipe: Recipe) -> dict[str, Value]:
    rollout = recipe.rollout
    # An answer begins as long as there is room for a longest one: the same episodes end early as with Clew.
    longest_input = rollout.max_tokens - rollout.max_new_tokens
    found: dict[str, Value] = {
        "generator.n_samples_per_prompt": recipe.algorithm.group_size,
        "generator.max_turns": longest_episode(recipe)[1],  # the rows hold their own caps
        "generator.max_input_length": longest_input,
        "trainer.max_prompt_length": longest_input,  # SkyRL leaves rows with longer ones out
        "generator.inference_engine.backend": rollout.engine,
        "generator.inference_engine.engine_init_kwargs.max_model_len": rollout.max_tokens,
        "generator.inference_engine.max_num_seqs": rollout.concurrent_episodes,
        "generator.inference_engine.gpu_memory_utilization": rollout.memory_utilization,
    }
    for kind in ("sampling_params", "eval_sampling_params"):  # SkyRL would evaluate greedily
        found[f"generator.{kind}.temperature"] = rollout.temperature
        found[f"generator.{kind}.max_generate_length"] = rollout.max_new_tokens
    return found


def _algorithm(recipe: Recipe) -> dict[str, Value]:
    table, prefix = recipe.algorithm, "trainer.algorithm"
    cap = tis_cap(recipe)
    dr_grpo = table.loss_reduction == "dr_grpo"
    found: dict[str, Value] = {
        f"{prefix}.advantage_estimator": "grpo",
        f"{prefix}.grpo_norm_by_std": table.advantage == "grpo",
        f"{prefix}.eps_clip_low": table.clip_low,
        f"{prefix}.eps_clip_high": table.clip_high,
        f"{prefix}.loss_reduction": "seq_mean_token_sum_norm" if dr_grpo else table.loss_reduction,
        f"{prefix}.use_kl_loss": table.kl_coef > 0,
        f"{prefix}.off_policy_correction.tis_ratio_type": "token" if cap else None,
    }
    if dr_grpo:
        found[f"{prefix}.max_seq_len"] = recipe.rollout.max_tokens
    if table.kl_coef > 0:
        found[f"{prefix}.kl_loss_coef"] = table.kl_coef
        found[f"{prefix}.kl_estimator_type"] = "k3"
    if cap:
        found[f"{prefix}.off_policy_correction.token_tis_ratio_clip_high"] = cap
    return found


def _training(recipe: Recipe) -> dict[str, Value]:
    table, prefix = recipe.training, "trainer.policy.optimizer_config"
    updates = table.minibatches * table.epochs
    micro = _micro_batch(recipe)
    schedule = "constant_with_warmup" if table.schedule == "constant" else table.schedule
    return {
        "trainer.run_name": file_name(recipe),
        "trainer.seed": table.seed,
        # The data set has a row for each task of the run, so that it is gone through once, and SkyRL's last, incomplete
        # batch, which it would drop, is empty.
        "trainer.epochs": 1,
        "trainer.max_training_steps": table.steps,
        "trainer.train_batch_size": table.prompts_per_step,
        "trainer.policy_mini_batch_size": table.prompts_per_step // table.minibatches,
        "trainer.update_epochs_per_batch": table.epochs,
        "trainer.micro_train_batch_size_per_gpu": micro,
        "trainer.micro_forward_batch_size_per_gpu": micro,
        "trainer.gradient_checkpointing": table.gradient_checkpointing,
        f"{prefix}.lr": table.learning_rate,
        f"{prefix}.scheduler": schedule,
        f"{prefix}.num_warmup_steps": table.warmup_steps * updates,  # SkyRL counts optimizer updates
        f"{prefix}.weight_decay": table.weight_decay,
        f"{prefix}.max_grad_norm": table.max_grad_norm,
    }


def _micro_batch(recipe: Recipe) -> int:
    """Trajectories in a forward pass: the most whose padded tokens fit, of those that divide a rank's minibatch."""
    ranks = recipe.runtime.nodes * recipe.runtime.workers_per_node
    share = recipe.training.prompts_per_step // recipe.training.minibatches * recipe.algorithm.group_size // ranks
    most = recipe.training.tokens_per_microbatch // recipe.rollout.max_tokens
    return next(n for n in range(min(most, share), 0, -1) if share % n == 0)


def _schedule(recipe: Recipe) -> dict[str, Value]:
    """When it evaluates and saves. SkyRL, too, does all of it at the last step."""
    return {
        "trainer.eval_batch_size": _heldout_rows(recipe),
        "trainer.eval_interval": recipe.evaluation.interval,
        "trainer.eval_before_train": recipe.evaluation.before_training,
        "trainer.ckpt_interval": recipe.checkpoint.interval,
        "trainer.max_ckpts_to_keep": recipe.checkpoint.keep,
        "trainer.hf_save_interval": recipe.checkpoint.export_interval,
    }


def _heldout_rows(recipe: Recipe) -> int:
    """Rows of the evaluation's data set: an evaluation in one batch plays all its episodes at once."""
    table = recipe.evaluation
    return sum(table.confirm_size if name == "unseen" else table.size for name in table.suites)


def _placement(recipe: Recipe) -> dict[str, Value]:
    runtime, found = recipe.runtime, dict[str, Value]()
    for role in ("policy", "ref"):  # they share their devices
        found[f"trainer.placement.{role}_num_nodes"] = runtime.nodes
        found[f"trainer.placement.{role}_num_gpus_per_node"] = runtime.workers_per_node
    found["trainer.placement.colocate_all"] = runtime.colocate
    found["generator.inference_engine.num_engines"] = runtime.engines
    return found
