"""Which field of a recipe SkyRL 0.4.0 has a counterpart for, what is reported, and what is refused.

Every field is in exactly one of three tables (a test walks the schema): ``COUNTERPARTS``, ``OURS`` (Clew's own side
keeps it: environments, tasks, other commands) and ``WITHOUT_COUNTERPART``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from clew.envs.suites import file_stem
from clew.evaluation.suites import longest_episode
from clew.recipe import Recipe
from clew.rollout.lora_room import LORA_RANKS

EPSILON = 1e-6
"""What SkyRL 0.4.0 adds to a group's standard deviation; it has no option for it."""

COUNTERPARTS = {
    "name": ("trainer.run_name",),
    "model.path": ("trainer.policy.model.path",),
    "model.subfolder": ("trainer.policy.model.path",),
    "model.revision": ("trainer.policy.model.path",),
    "model.dtype": ("generator.inference_engine.model_dtype",),
    "model.lora.rank": ("trainer.policy.model.lora.rank",),
    "model.lora.alpha": ("trainer.policy.model.lora.alpha",),
    "model.lora.dropout": ("trainer.policy.model.lora.dropout",),
    "model.lora.target": ("trainer.policy.model.lora.target_modules",),
    "environment.max_turns": ("generator.max_turns",),
    "rollout.engine": ("generator.inference_engine.backend",),
    "rollout.temperature": ("generator.sampling_params.temperature", "generator.eval_sampling_params.temperature"),
    "rollout.max_new_tokens": (
        "generator.sampling_params.max_generate_length",
        "generator.eval_sampling_params.max_generate_length",
        "generator.max_input_length",
        "trainer.max_prompt_length",
    ),
    "rollout.max_tokens": (
        "generator.max_input_length",
        "trainer.max_prompt_length",
        "generator.inference_engine.engine_init_kwargs.max_model_len",
    ),
    "rollout.concurrent_episodes": ("generator.inference_engine.max_num_seqs",),
    "rollout.memory_utilization": ("generator.inference_engine.gpu_memory_utilization",),
    "algorithm.group_size": ("generator.n_samples_per_prompt",),
    "algorithm.advantage": ("trainer.algorithm.advantage_estimator", "trainer.algorithm.grpo_norm_by_std"),
    "algorithm.clip_low": ("trainer.algorithm.eps_clip_low",),
    "algorithm.clip_high": ("trainer.algorithm.eps_clip_high",),
    "algorithm.loss_reduction": ("trainer.algorithm.loss_reduction", "trainer.algorithm.max_seq_len"),
    "algorithm.kl_coef": ("trainer.algorithm.use_kl_loss", "trainer.algorithm.kl_loss_coef"),
    "algorithm.tis_cap": (
        "trainer.algorithm.off_policy_correction.tis_ratio_type",
        "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
    ),
    "training.steps": ("trainer.max_training_steps",),
    "training.prompts_per_step": ("trainer.train_batch_size", "trainer.policy_mini_batch_size"),
    "training.learning_rate": ("trainer.policy.optimizer_config.lr",),
    "training.warmup_steps": ("trainer.policy.optimizer_config.num_warmup_steps",),
    "training.schedule": ("trainer.policy.optimizer_config.scheduler",),
    "training.weight_decay": ("trainer.policy.optimizer_config.weight_decay",),
    "training.max_grad_norm": ("trainer.policy.optimizer_config.max_grad_norm",),
    "training.minibatches": ("trainer.policy_mini_batch_size",),
    "training.epochs": ("trainer.update_epochs_per_batch",),
    "training.tokens_per_microbatch": (
        "trainer.micro_train_batch_size_per_gpu",
        "trainer.micro_forward_batch_size_per_gpu",
    ),
    "training.gradient_checkpointing": ("trainer.gradient_checkpointing",),
    "training.seed": ("trainer.seed",),
    "evaluation.size": ("trainer.eval_batch_size",),
    "evaluation.confirm_size": ("trainer.eval_batch_size",),  # of the suite "unseen"
    "evaluation.interval": ("trainer.eval_interval",),
    "evaluation.before_training": ("trainer.eval_before_train",),
    "checkpoint.interval": ("trainer.ckpt_interval",),
    "checkpoint.keep": ("trainer.max_ckpts_to_keep",),
    "checkpoint.export_interval": ("trainer.hf_save_interval",),
    "runtime.nodes": ("trainer.placement.policy_num_nodes", "trainer.placement.ref_num_nodes"),
    "runtime.workers_per_node": (
        "trainer.placement.policy_num_gpus_per_node",
        "trainer.placement.ref_num_gpus_per_node",
    ),
    "runtime.engines": ("generator.inference_engine.num_engines",),
    "runtime.colocate": ("trainer.placement.colocate_all",),
}
"""Field of a recipe: the options of SkyRL that depend on it."""

OURS = (
    "environment.*",  # in the rows of the data set
    "evaluation.suites",  # the same
    "model.device",  # checked: SkyRL's trainer is CUDA only
    "model.lora.vision",  # checked: no runtime of Clew's adapts the vision tower
    "algorithm.epsilon",  # checked: SkyRL's is fixed
    "algorithm.step_advantage_weight",  # of gigpo, which is refused
    "sft.*",  # `clew sft`
    "runtime.kind",
    "runtime.address",  # RAY_ADDRESS
    "runtime.visgym_path",  # CLEW_VISGYM of the task that plays
    "runtime.env_processes",  # an argument of that task
    "runtime.shared_dir",  # the run directory lies there
    "runtime.device_memory_gb",  # `clew cluster plan`
    "cluster.*",  # `clew cluster render`
)
"""Fields that Clew's own side of a SkyRL run keeps or checks."""

WITHOUT_COUNTERPART = {
    "rollout.deadline_s": "SkyRL waits for the slowest episode",
    "evaluation.references": "`clew eval --policy random|no-turn-back|oracle` plays them",
    "evaluation.sight": "SkyRL does not test that the agent uses its eyes",
    "runtime.threads": "SkyRL chooses the threads of its workers",
    "runtime.storage_patience_s": "a failed write of SkyRL's ends the run at once",
    "tracking.tensorboard": "SkyRL has one tracker, the console: find eval/all/environment in the output with grep",
    "cost.*": "a SkyRL run writes no summary.json",
}
"""Fields that change nothing in a SkyRL run, and why."""

_GENERAL = (
    "SkyRL evaluates at every start where trainer.eval_before_train is set, that of a continued run too",
    "SkyRL masks no vision tokens: an answer that holds one may end the run in an error",
    "SkyRL writes adapters for its engines in place: which version sampled a token is not recorded",
    "SkyRL keeps the base model in 32 bits on the policy workers: 4 bytes a parameter, shared among the ranks",
)


def refused(recipe: Recipe, run_dir: Path) -> Iterator[str]:
    """Every value whose meaning SkyRL would change, with the remedy.

    Args:
        run_dir: of the run, absolute.
    """
    model, algorithm, runtime = recipe.model, recipe.algorithm, recipe.runtime
    if model.dtype != "bfloat16":
        yield f'model.dtype = "{model.dtype}": SkyRL computes in bfloat16 (set model.dtype="bfloat16")'
    if model.device == "cpu":
        yield 'model.device = "cpu": SkyRL\'s trainer needs CUDA (set model.device="cuda")'
    if model.lora.rank not in LORA_RANKS:  # SkyRL hands vLLM the adapter's own rank
        yield f"model.lora.rank = {model.lora.rank}: vLLM takes {', '.join(map(str, LORA_RANKS))}"
    if not float(model.lora.alpha).is_integer():
        yield f"model.lora.alpha = {model.lora.alpha}: SkyRL takes whole numbers"
    if recipe.rollout.engine != "vllm":
        yield f'rollout.engine = "{recipe.rollout.engine}": SkyRL samples with vLLM (set rollout.engine="vllm")'
    if algorithm.advantage == "gigpo":
        yield 'algorithm.advantage = "gigpo": SkyRL has no advantages by turn (choose "grpo" or "grpo_no_std")'
    if algorithm.advantage == "grpo" and algorithm.epsilon != EPSILON:
        yield f"algorithm.epsilon = {algorithm.epsilon}: SkyRL's is fixed (set algorithm.epsilon={EPSILON})"
    if algorithm.kl_coef > 0 and algorithm.loss_reduction != "sequence_mean":
        yield (
            f"algorithm.kl_coef = {algorithm.kl_coef}: SkyRL averages the divergence by trajectory, whatever the loss "
            'does (set algorithm.loss_reduction="sequence_mean" or algorithm.kl_coef=0)'
        )
    longest, _ = longest_episode(recipe)
    if longest > recipe.rollout.max_tokens:
        yield (
            f"evaluation.suites = {', '.join(recipe.evaluation.suites)}: one of them needs {longest} tokens, "
            f"and SkyRL has one limit for all, rollout.max_tokens = {recipe.rollout.max_tokens} (leave it out: "
            "`clew eval --suite` plays it with what the run exports)"
        )
    devices = runtime.nodes * runtime.workers_per_node
    if runtime.colocate and runtime.engines != devices:
        yield (
            f"runtime.engines = {runtime.engines}: with runtime.colocate, SkyRL wants one for each of the {devices} "
            f"policy workers (set runtime.engines={devices})"
        )
    if runtime.nodes > 1:
        if runtime.shared_dir is None:
            yield f"runtime.shared_dir: {runtime.nodes} machines need a folder that all of them see (name it)"
        elif not run_dir.is_relative_to(os.path.abspath(os.path.expanduser(runtime.shared_dir))):
            yield (
                f"--run {run_dir} is not below runtime.shared_dir = {runtime.shared_dir}, so that the machines "
                "would not see each other's adapters and checkpoints (choose a run directory there)"
            )


def reported(recipe: Recipe) -> Iterator[str]:
    """What changes nothing in a SkyRL run of this recipe, and what SkyRL does otherwise than Clew."""
    for key, reason in WITHOUT_COUNTERPART.items():
        if key.endswith(".*"):
            yield f"[{key[:-2]}]: {reason}"
        elif value := attrgetter(key)(recipe):
            yield f"{key} = {json.dumps(value)}: {reason}"
    if recipe.training.warmup_steps:
        yield "training.warmup_steps: SkyRL counts updates and from 0, so its first update has learning rate 0"
    if recipe.training.schedule != "constant" and recipe.training.minibatches * recipe.training.epochs > 1:
        yield (
            f"training.schedule = {json.dumps(recipe.training.schedule)}: SkyRL lowers the learning rate with every "
            "update, Clew with every step"
        )
    yield (
        f"evaluation.confirm_size = {recipe.evaluation.confirm_size}: SkyRL does not confirm its best step (`clew eval "
        '--run` plays any suite); it is only the size of a suite "unseen" in evaluation.suites'
    )
    figures = f"eval/all/environment/{file_stem(recipe.evaluation.suites[0])}"
    yield (
        "evaluation.suites: SkyRL's pass_at_1 counts rewards, and in eval/all those of all suites; what was solved of "
        f"{recipe.evaluation.suites[0]} is {figures}/solved, of {figures}/episodes"
    )
    if recipe.algorithm.kl_coef > 0:
        yield "algorithm.kl_coef: SkyRL cuts the estimate of a token's divergence at 10 nats"
    yield from _GENERAL
