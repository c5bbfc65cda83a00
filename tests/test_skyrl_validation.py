"""What the real SkyRL 0.4.0 says of Clew's translation, and does with it (`make test-skyrl`)."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from clew.envs.visgym import pool
from clew.errors import UserError
from clew.recipe import load_recipe
from clew.runtime.skyrl import entrypoint, validate
from clew.runtime.skyrl.checkpoints import LATEST, prepare_resume
from clew.runtime.skyrl.translate import Value, shell_words, translate

pytestmark = [
    pytest.mark.skyrl,
    pytest.mark.skipif(find_spec("skyrl_gym") is None, reason="SkyRL is not installed here: run `make test-skyrl`"),
]

RUN = Path("/shared/runs/hyperpod-seed0")
# Every option of the published run that was read off SkyRL's own examples and tried with it.
PUBLISHED = """
trainer.strategy trainer.policy.model.path trainer.policy.model.lora.rank trainer.policy.model.lora.alpha
trainer.policy.model.lora.dropout trainer.policy.model.lora.target_modules trainer.policy.model.lora.exclude_modules
trainer.policy.model.lora.lora_sync_path trainer.policy.model.lora.sync_mode trainer.policy.optimizer_config.lr
trainer.placement.colocate_all trainer.placement.policy_num_nodes trainer.placement.policy_num_gpus_per_node
trainer.placement.ref_num_nodes trainer.placement.ref_num_gpus_per_node generator.inference_engine.backend
generator.inference_engine.run_engines_locally generator.inference_engine.num_engines
generator.inference_engine.tensor_parallel_size generator.inference_engine.gpu_memory_utilization
generator.inference_engine.enforce_eager generator.inference_engine.engine_init_kwargs.max_model_len
generator.vision_language_generator generator.batched generator.use_conversation_multi_turn generator.max_turns
generator.max_input_length generator.n_samples_per_prompt generator.eval_n_samples_per_prompt
generator.sampling_params.temperature generator.sampling_params.max_generate_length trainer.remove_microbatch_padding
trainer.algorithm.advantage_estimator trainer.algorithm.grpo_norm_by_std trainer.algorithm.use_kl_loss
trainer.algorithm.policy_loss_type trainer.algorithm.loss_reduction trainer.train_batch_size
trainer.policy_mini_batch_size trainer.micro_forward_batch_size_per_gpu trainer.micro_train_batch_size_per_gpu
trainer.max_prompt_length trainer.epochs trainer.eval_batch_size trainer.eval_before_train trainer.eval_interval
trainer.ckpt_interval trainer.hf_save_interval trainer.max_ckpts_to_keep trainer.resume_mode trainer.ckpt_path
trainer.export_path trainer.log_path trainer.dump_eval_results trainer.logger environment.env_class
"""


def options(*overrides: str) -> dict[str, Value]:
    return translate(load_recipe("hyperpod", ["runtime.kind=skyrl", *overrides]), RUN, "/shared/m").overrides


def value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def test_the_published_run_is_valid_and_nothing_in_it_is_unknown() -> None:
    given = options()
    config = validate.validate(given)
    assert set(PUBLISHED.split()) <= given.keys()
    for key, value in given.items():
        found = value_at(config, key)
        assert found == value and type(found) is type(value), key
    assert config.trainer.algorithm.temperature == 0.7, "the scorer's temperature follows the engines'"
    assert config.trainer.critic.model.path is None
    assert config.generator.eval_sampling_params.top_p == 1.0 and config.generator.eval_sampling_params.top_k == -1


def test_the_printed_list_is_the_same_configuration() -> None:
    words = [shlex.split(line)[0] for line in shell_words(options())]
    assert validate.validate(words) == validate.validate(options())


@pytest.mark.parametrize(
    "overrides",
    [
        ['model.lora.target=["q_proj", "v_proj"]'],
        ["algorithm.loss_reduction=dr_grpo", "algorithm.advantage=grpo_no_std", "algorithm.tis_cap=0"],
        ["algorithm.loss_reduction=sequence_mean", "algorithm.kl_coef=0.01", "training.schedule=cosine"],
        ["runtime.colocate=false", "runtime.engines=3", "training.epochs=2", "training.warmup_steps=5"],
        ["training.schedule=linear", "training.tokens_per_microbatch=36864", "evaluation.before_training=false"],
        ["runtime.nodes=1", "runtime.workers_per_node=1", "runtime.engines=1", "training.prompts_per_step=2"],
    ],
)
def test_other_recipes_are_valid_too(overrides: list[str]) -> None:
    validate.validate(options(*overrides))


LET_PASS = {
    "trainer.logger": "nonsense",
    "trainer.eval_interval": "abc",
    "trainer.resume_mode": "perhaps",
    "trainer.algorithm.zero_variance_filter": True,
    "trainer.policy.model.lora.exclude_modules": None,
    "trainer.policy.optimizer_config.scheduler": "sometimes",
}


@pytest.mark.parametrize("key", LET_PASS)
def test_what_skyrl_lets_pass_is_refused(key: str) -> None:
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import validate_cfg

    wrong = {**options(), key: LET_PASS[key]}
    validate_cfg(SkyRLTrainConfig.from_cli_overrides(wrong))  # if it stops passing, Clew's own check may go
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        validate.validate(wrong)


def test_a_batch_that_skyrl_would_cut_is_refused() -> None:
    with pytest.raises(UserError, match=r"train_batch_size=32 .*6 policy workers"):
        validate.validate({**options(), "trainer.train_batch_size": 32, "trainer.policy_mini_batch_size": 16})
    with pytest.raises(UserError, match=r"training\.prompts_per_step = 32"):
        options("training.prompts_per_step=32")


def test_log_probabilities_have_the_temperature_of_the_scorer() -> None:
    given = options()
    del given["generator.inference_engine.engine_init_kwargs.logprobs_mode"]
    with pytest.raises(UserError, match="logprobs_mode"):
        validate.validate(given)


@pytest.mark.parametrize(
    "wrong", [{"trainer.nonsense": 1}, {"trainer.algorithm.loss_reduction": "mean"}, {"trainer.train_batch_size": 25}]
)
def test_what_skyrl_refuses_is_one_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^SkyRL"):
        validate.validate({**options(), **wrong})


def test_skyrls_own_loader_gives_exactly_the_steps_of_the_run() -> None:
    """Shuffled, every task once, nothing dropped."""
    from skyrl.train.utils.trainer_utils import build_dataloader

    class Rows(list):  # type: ignore[type-arg]
        collate_fn = staticmethod(lambda items: items)

    config = validate.validate({**options("training.steps=5"), "data.dataloader.num_workers": 0})
    batches = list(build_dataloader(config, Rows(range(5 * 24))))
    assert len(batches) * config.trainer.epochs == 5 == config.trainer.max_training_steps
    assert sorted(row for batch in batches for row in batch) == list(range(5 * 24))


def test_skyrl_goes_on_from_what_was_prepared(tmp_path: Path) -> None:
    from skyrl.train.utils.trainer_utils import (
        cleanup_old_checkpoints,
        list_checkpoint_dirs,
        validate_consistency_for_latest_checkpoint,
    )

    for step in (20, 40, 60):
        policy = tmp_path / f"global_step_{step}" / "policy"
        policy.mkdir(parents=True)
        for kind in ("model", "optim", "extra_state"):
            torch.save({}, policy / f"{kind}_world_size_1_rank_0.pt")
        if step < 60:  # killed before the third was whole
            torch.save({}, policy.parent / "data.pt")
            torch.save({"global_step": step}, policy.parent / "trainer_state.pt")
    (tmp_path / LATEST).write_text("")
    assert prepare_resume(tmp_path, 1).step == 40
    step = int((tmp_path / LATEST).read_text())
    validate_consistency_for_latest_checkpoint(
        str(tmp_path), step, str(tmp_path / f"global_step_{step}"), str(tmp_path / LATEST), 20
    )
    cleanup_old_checkpoints(str(tmp_path), 1)
    assert list_checkpoint_dirs(str(tmp_path)) == ["global_step_40"], "the last whole one is not deleted"


def test_the_ray_task_knows_clews_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import skyrl_gym
    from skyrl.train.entrypoints import main_base

    seen: list[tuple[Any, bool]] = []

    class Experiment:
        def __init__(self, config: Any) -> None:
            self.config = config

        def run(self) -> None:
            seen.append((self.config, self.config["env"] in skyrl_gym.registry))

    monkeypatch.setattr(main_base, "BasePPOExp", Experiment)
    monkeypatch.setattr(pool, "processes", 2)
    config = {"env": options()["environment.env_class"]}
    entrypoint.train_task._function(config)
    assert seen == [(config, True)] and pool.processes == 2
    entrypoint.train_task._function(config, 7)
    assert pool.processes == 7


def test_the_task_that_plays_is_told_where_visgym_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster that was started without it; what SkyRL hands on stays."""
    import ray
    from skyrl.train.utils import utils

    @ray.remote(num_cpus=1)
    def play(told: str, env_processes: int | None) -> None:
        Path(told).write_text(f"{os.environ.get('CLEW_VISGYM')} {os.environ.get('OF_SKYRL')} {env_processes}")

    def initialize(config: Any) -> None:
        with monkeypatch.context() as bare:
            bare.delenv("CLEW_VISGYM", raising=False)
            ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": {"OF_SKYRL": "1"}})

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(utils, "initialize_ray", initialize)
    monkeypatch.setattr(entrypoint, "train_task", play)
    monkeypatch.setenv("CLEW_VISGYM", "/opt/visgym")
    try:
        entrypoint.run(str(tmp_path / "told"), 7)
    finally:
        ray.shutdown()
    assert (tmp_path / "told").read_text() == "/opt/visgym 1 7"


def test_the_entrypoint_refuses_nonsense_before_it_starts_anything() -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "clew.runtime.skyrl.entrypoint", "trainer.logger=nonsense"],
        capture_output=True,
        text=True,
        env={**os.environ},
    )
    assert outcome.returncode == 2
    assert outcome.stderr.splitlines()[-1].startswith("clew: error: SkyRL's configuration: trainer.logger=nonsense")


def test_dry_run_says_that_it_is_valid(clew: Any) -> None:
    outcome = clew("train", "hyperpod", "runtime.kind=skyrl", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1].startswith(f"# valid: SkyRL accepts these {len(options())} options")
