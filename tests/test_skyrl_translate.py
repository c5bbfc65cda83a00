"""From a recipe to SkyRL's options; no SkyRL is needed here (its own word on them: test_skyrl_validation)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from pydantic import BaseModel
from transformers import get_scheduler

from clew.envs.base import Task
from clew.envs.maze_env import ENV_ID
from clew.errors import UserError
from clew.evaluation.suites import environment_settings
from clew.policy.adapter import attach_lora
from clew.recipe import Recipe, load_recipe
from clew.rollout.vllm_options import LORA_RANKS as VLLM_RANKS
from clew.runtime.skyrl.fields import COUNTERPARTS, LORA_RANKS, OURS, WITHOUT_COUNTERPART
from clew.runtime.skyrl.tasks import _row, heldout_rows
from clew.runtime.skyrl.translate import Value, shell_words, translate
from clew.training.importance import tis_cap
from clew.training.update import Updater

RUN = Path("/shared/runs/hyperpod-seed0")


def hyperpod(*overrides: str) -> Recipe:
    return load_recipe("hyperpod", ["runtime.kind=skyrl", *overrides])


def options(*overrides: str) -> dict[str, Value]:
    return translate(hyperpod(*overrides), RUN, "/shared/models/m").overrides


def leaves(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in table.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_field_of_a_recipe_is_translated_kept_or_reported() -> None:
    """One that is added to the schema has to be put somewhere. Whole tables stand for their fields."""

    def under(patterns: Any, key: str) -> bool:
        return any(key == p or (p.endswith(".*") and key.startswith(p[:-1])) for p in patterns)

    for key in leaves(Recipe):
        exact, kept, none = key in COUNTERPARTS, under(OURS, key), under(WITHOUT_COUNTERPART, key)
        # A turn cap is in the rows, with its environment, and an option too.
        assert exact + kept + none == 1 or key == "environment.max_turns", key
    known = set(leaves(Recipe))
    assert set(COUNTERPARTS) <= known
    assert {key for key in (*OURS, *WITHOUT_COUNTERPART) if not key.endswith(".*")} <= known


OTHER_VALUES: dict[str, str] = {
    "name": "other",
    "model.lora.rank": "64",
    "model.lora.alpha": "16",
    "model.lora.dropout": "0.1",
    "model.lora.target": '["q_proj"]',
    "environment.max_turns": "20",
    "rollout.temperature": "0.9",
    "rollout.max_new_tokens": "512",
    "rollout.max_tokens": "8192",
    "rollout.concurrent_episodes": "16",
    "rollout.memory_utilization": "0.5",
    "algorithm.group_size": "16",
    "algorithm.advantage": "grpo_no_std",
    "algorithm.clip_low": "0.1",
    "algorithm.clip_high": "0.3",
    "algorithm.loss_reduction": "dr_grpo",
    "algorithm.tis_cap": "3.0",
    "training.steps": "100",
    "training.prompts_per_step": "48",
    "training.learning_rate": "1e-5",
    "training.warmup_steps": "5",
    "training.schedule": "cosine",
    "training.weight_decay": "0.1",
    "training.max_grad_norm": "0.5",
    "training.minibatches": "4",
    "training.epochs": "2",
    "training.tokens_per_microbatch": "36864",
    "training.gradient_checkpointing": "false",
    "training.seed": "7",
    "evaluation.size": "128",
    "evaluation.interval": "5",
    "evaluation.before_training": "false",
    "checkpoint.interval": "10",
    "checkpoint.keep": "2",
    "checkpoint.export_interval": "40",
}


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_a_field_changes_its_options_and_no_others(key: str) -> None:
    before, after = options(), options(f"{key}={OTHER_VALUES[key]}")
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert changed, "the field has no effect"
    # One part of a batch follows from several fields; everything else is the field's alone.
    derived = {"trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"}
    assert changed - derived <= set(COUNTERPARTS[key]), changed
    if key == "algorithm.advantage":
        assert changed == {"trainer.algorithm.grpo_norm_by_std"}


def test_fields_that_must_change_together() -> None:
    placed = options("runtime.workers_per_node=4", "runtime.engines=12")
    assert (
        placed["trainer.placement.policy_num_gpus_per_node"] == 4 == placed["trainer.placement.ref_num_gpus_per_node"]
    )
    assert placed["generator.inference_engine.num_engines"] == 12
    apart = options("runtime.colocate=false", "runtime.engines=3")
    assert apart["trainer.placement.colocate_all"] is False and apart["generator.inference_engine.num_engines"] == 3
    kl = options("algorithm.kl_coef=0.01", "algorithm.loss_reduction=sequence_mean")
    assert kl["trainer.algorithm.use_kl_loss"] is True and kl["trainer.algorithm.kl_loss_coef"] == 0.01
    none = options("algorithm.tis_cap=0")
    assert none["trainer.algorithm.off_policy_correction.tis_ratio_type"] is None
    assert options("algorithm.loss_reduction=dr_grpo")["trainer.algorithm.max_seq_len"] == 9216
    assert options("training.warmup_steps=5")["trainer.policy.optimizer_config.num_warmup_steps"] == 10  # updates


def test_the_published_run() -> None:
    """What was published, and what makes the run right where SkyRL's defaults do not."""
    found = options()
    published = {
        "trainer.strategy": "fsdp",
        "trainer.policy.model.lora.rank": 32,
        "trainer.policy.model.lora.exclude_modules": ".*visual.*",
        "trainer.placement.colocate_all": True,
        "trainer.placement.policy_num_nodes": 3,
        "trainer.placement.policy_num_gpus_per_node": 2,
        "generator.inference_engine.num_engines": 6,
        "generator.inference_engine.gpu_memory_utilization": 0.45,
        "generator.vision_language_generator": True,
        "generator.max_turns": 15,
        "generator.max_input_length": 8192,
        "generator.n_samples_per_prompt": 8,
        "generator.sampling_params.temperature": 0.7,
        "generator.eval_sampling_params.temperature": 0.7,  # SkyRL's default is greedy
        "generator.sampling_params.max_generate_length": 1024,
        "generator.inference_engine.engine_init_kwargs.logprobs_mode": "processed_logprobs",
        "trainer.train_batch_size": 24,
        "trainer.policy_mini_batch_size": 12,
        "trainer.eval_interval": 10,
        "trainer.eval_batch_size": 64,
        "trainer.ckpt_interval": 20,
        "trainer.hf_save_interval": 20,
        "trainer.resume_mode": "latest",
        "trainer.logger": "console",
        "trainer.policy.optimizer_config.weight_decay": 0.0,  # SkyRL's default is 0.01
        "environment.env_class": "clew",
    }
    assert {key: found.get(key) for key in published} == published
    assert (
        found["generator.max_input_length"] + 1024
        == found[  # type: ignore[operator]
            "generator.inference_engine.engine_init_kwargs.max_model_len"
        ]
    )
    places = [
        *(found[f"trainer.{name}"] for name in ("ckpt_path", "export_path", "log_path")),
        found["trainer.policy.model.lora.lora_sync_path"],
        *(found["data.train_data"] + found["data.val_data"]),  # type: ignore[operator]
    ]
    assert len(set(map(str, places))) == 6
    assert all(Path(str(place)).is_relative_to(RUN) for place in places)


def test_the_data_set_is_gone_through_once_in_exactly_the_steps_of_the_run() -> None:
    """SkyRL: steps = floor(rows / batch) x epochs, at most max_training_steps; the rest of the rows is dropped."""
    for steps in (1, 7, 160):
        recipe = hyperpod(f"training.steps={steps}")
        found = translate(recipe, RUN, "m").overrides
        rows = steps * recipe.training.prompts_per_step
        batch, epochs = found["trainer.train_batch_size"], found["trainer.epochs"]
        assert rows % batch == 0 and rows // batch * epochs == steps  # type: ignore[operator]
        assert found["trainer.max_training_steps"] == steps


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["model.dtype=float32"], "model.dtype"),
        (["model.device=cpu"], "model.device"),
        (["model.lora.rank=12"], "model.lora.rank"),
        (["model.lora.alpha=1.5"], "model.lora.alpha"),
        (["rollout.engine=transformers"], "rollout.engine"),
        (["algorithm.advantage=gigpo"], "algorithm.advantage"),
        (["algorithm.epsilon=1e-4"], "algorithm.epsilon"),
        (["algorithm.kl_coef=0.1"], "algorithm.kl_coef"),
        (["runtime.engines=5"], "runtime.engines"),
        (["runtime.shared_dir=/elsewhere"], "--run"),
    ],
)
def test_what_skyrl_would_change_is_refused(overrides: list[str], names: str) -> None:
    with pytest.raises(
        UserError, match=rf'^runtime\.kind = "skyrl": {names}[ :].*\)$|vLLM takes|whole numbers'
    ) as error:
        translate(hyperpod(*overrides), RUN, "m")
    assert names in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_suite_is_named(clew: Any) -> None:
    """And not taken for one that is too long."""
    with pytest.raises(UserError, match=r"^evaluation\.suites: 'nope:maze' is unknown"):
        options('evaluation.suites=["heldout", "nope:maze"]')
    outcome = clew("train", "hyperpod", "runtime.kind=skyrl", 'evaluation.suites=["nope:maze"]', "--dry-run")
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 1
    assert "'nope:maze' is unknown" in outcome.err and "tokens" not in outcome.err


def test_an_evaluation_is_one_batch_of_all_its_rows() -> None:
    """Suites differ in size; the rows are counted where they are made."""
    changes = (f"environment.id={ENV_ID}", "evaluation.size=3", "evaluation.confirm_size=5")
    for suites in (["heldout"], ["unseen"], ["heldout", "unseen", "colours"]):
        recipe = hyperpod(*changes, f"evaluation.suites={json.dumps(suites)}")
        rows = heldout_rows(recipe)
        assert translate(recipe, RUN, "m").overrides["trainer.eval_batch_size"] == len(rows)
        assert [row["data_source"] for row in rows] == [row["suite"] for row in rows]


def test_rows_hold_what_a_task_is_and_nothing_of_a_machine() -> None:
    """VisGym's settings; its folder and processes are the machine's. Names of metrics hold no slashes."""
    for name in ("runtime.visgym_path=/opt/v", "runtime.env_processes=7"):
        recipe = hyperpod("environment.id=visgym:maze_2d/easy", name)
        task = Task("visgym:maze_2d/easy", 3, "abc")
        row = _row(task, "visgym:maze_2d/easy", "Go.", environment_settings(recipe))
        assert json.loads(row["settings"]) == {"max_turns": 15}
        assert row["data_source"] == "visgym-maze_2d-easy" and row["suite"] == "visgym:maze_2d/easy"


def test_figures_are_named_as_skyrl_writes_them() -> None:
    (line,) = (x for x in translate(hyperpod(), RUN, "m").reported if x.startswith("evaluation.suites"))
    assert "eval/all/environment/heldout/solved" in line and "pass_at_1 counts rewards" in line
    recipe = hyperpod('evaluation.suites=["visgym:maze_2d/easy", "heldout"]')
    (line,) = (x for x in translate(recipe, RUN, "m").reported if x.startswith("evaluation.suites"))
    assert "eval/all/environment/visgym-maze_2d-easy/solved" in line


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["training.schedule=cosine"], True),  # two minibatches
        (["training.schedule=linear", "training.minibatches=1", "training.epochs=2"], True),
        (["training.schedule=linear", "training.minibatches=1"], False),
        ([], False),
    ],
)
def test_a_schedule_by_updates_is_reported(overrides: list[str], said: bool) -> None:
    lines = translate(hyperpod(*overrides), RUN, "m").reported
    assert any(line.startswith("training.schedule") and "every update" in line for line in lines) == said


def test_all_that_is_refused_is_named_at_once() -> None:
    with pytest.raises(UserError) as error:
        translate(load_recipe("laptop", ["runtime.kind=skyrl"]), RUN, "m")
    assert all(key in str(error.value) for key in ("model.dtype", "rollout.engine", "algorithm.epsilon", "suites"))


def test_the_epsilon_does_not_matter_where_nothing_is_divided() -> None:
    assert options("algorithm.advantage=grpo_no_std", "algorithm.epsilon=1e-4")


def test_machines_that_share_no_folder_are_refused() -> None:
    recipe = hyperpod()
    lonely = recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"shared_dir": None})})
    with pytest.raises(UserError, match=r"runtime\.shared_dir"):
        translate(lonely, RUN, "m")


@given(
    prompts=st.integers(1, 48), parts=st.integers(1, 6), nodes=st.integers(1, 3), each=st.integers(1, 4),
    budget=st.integers(1, 20),
)  # fmt: skip
def test_no_batch_is_cut_and_none_is_too_long(prompts: int, parts: int, nodes: int, each: int, budget: int) -> None:
    """A recipe that loads gives batches that divide as SkyRL needs; its sizes are computed here as SkyRL does."""
    group, ranks = 4, nodes * each
    try:
        recipe = hyperpod(
            f"training.prompts_per_step={prompts}", f"training.minibatches={parts}", f"algorithm.group_size={group}",
            f"runtime.nodes={nodes}", f"runtime.workers_per_node={each}", f"runtime.engines={ranks}",
            f"training.tokens_per_microbatch={9216 * budget}",
        )  # fmt: skip
    except UserError:
        assert prompts % ranks or prompts % parts or prompts // parts * group % ranks
        return
    found: dict[str, Any] = translate(recipe, RUN, "m").overrides
    batch, mini = found["trainer.train_batch_size"], found["trainer.policy_mini_batch_size"]
    micro = found["trainer.micro_train_batch_size_per_gpu"]
    assert batch == prompts and batch * group % ranks == 0 and batch % mini == 0 and mini * group % ranks == 0
    assert batch // mini == parts
    assert mini * group // ranks % micro == 0 and 1 <= micro <= budget
    assert micro == found["trainer.micro_forward_batch_size_per_gpu"]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_the_learning_rate_is_clews(kind: str) -> None:
    """SkyRL takes transformers' schedules, stepped with each update, over steps x updates of them."""
    recipe = hyperpod(f"training.schedule={kind}", "training.minibatches=1", "training.steps=12")
    found: dict[str, Any] = translate(recipe, RUN, "m").overrides
    table = "trainer.policy.optimizer_config"
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=found[f"{table}.lr"])
    schedule = get_scheduler(
        found[f"{table}.scheduler"],
        optimizer,
        num_warmup_steps=found[f"{table}.num_warmup_steps"],
        num_training_steps=found["trainer.max_training_steps"],
    )
    updater = Updater.__new__(Updater)
    updater.training = recipe.training
    for step in range(1, 13):
        assert schedule.get_last_lr()[0] == pytest.approx(updater.learning_rate(step), rel=1e-12)
        optimizer.step()
        schedule.step()


def test_skyrl_adapts_the_layers_that_clew_adapts() -> None:
    """PEFT is called as SkyRL calls it; without the exclusion, it adapts the vision tower too."""
    found: dict[str, Any] = options()
    ours = {name for name, _ in attach_lora(tiny.tiny(), 4, 8, 0.0).named_parameters() if ".lora_A." in name}

    def theirs(exclude: str | None) -> set[str]:
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            target_modules=found["trainer.policy.model.lora.target_modules"],
            exclude_modules=exclude,
        )
        return {n for n, _ in get_peft_model(tiny.tiny().model, config).named_parameters() if ".lora_A." in n}

    assert theirs(found["trainer.policy.model.lora.exclude_modules"]) == ours
    assert any("visual" in name for name in theirs(None))


def test_numbers_that_are_written_twice_agree() -> None:
    assert LORA_RANKS == VLLM_RANKS
    assert options()["trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high"] == tis_cap(hyperpod())


texts = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Zl", "Zp")), max_size=12)


@given(
    st.one_of(
        texts, st.sampled_from(["null", "True", "off", "NO", "1e5", "inf", "all-linear", "/a b/c", "a: b", "~", ""]),
        st.integers(-(10**9), 10**9), st.booleans(), st.none(), st.lists(texts, max_size=3),
    )
)  # fmt: skip
def test_what_a_shell_hands_on_is_read_as_the_value(value: Value) -> None:
    (line,) = shell_words({"trainer.key": value})
    (word,) = shlex.split(line)
    key, _, text = word.partition("=")
    assert key == "trainer.key" and yaml.safe_load(text) == value and type(yaml.safe_load(text)) is type(value)


def test_reported_values_are_json() -> None:
    for line in translate(hyperpod(), RUN, "m").reported:
        if " = " in line.partition(": ")[0]:
            json.loads(line.partition(": ")[0].partition(" = ")[2])
