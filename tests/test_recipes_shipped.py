"""The recipes in the package: they load, they are named where users look, and `hyperpod` is the published run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
from conftest import Command

from clew.recipe import load_recipe, shipped_recipes
from clew.recipe.keys import KEYS

# The published run, value by value. What the publication says in words stands beside each.
PUBLISHED: dict[str, Any] = {
    # model: Qwen3-VL-8B, VisGym SFT checkpoint (folder `mixed_qwen3vl` of `VisGym/visgym_model`), LoRA rank 32
    "model.path": "VisGym/visgym_model",
    "model.subfolder": "mixed_qwen3vl",
    "model.lora.rank": 32,
    # algorithm: GRPO, 8 trajectories a maze, 15 moves a trajectory, reward only when the goal is reached in time
    "algorithm.advantage": "grpo",
    "algorithm.group_size": 8,
    "environment.id": "visgym:maze_2d/easy",
    "environment.max_turns": 15,
    "environment.goal": "stop",
    # held-out evaluation: 64 fixed mazes, once before training and every 10 steps
    "evaluation.suites": ("heldout",),
    "evaluation.size": 64,
    "evaluation.before_training": True,
    "evaluation.interval": 10,
    # saved every 20 steps: a full training checkpoint and, apart from it, an inference-ready LoRA export
    "checkpoint.interval": 20,
    "checkpoint.export_interval": 20,
    # layout: 3 workers x 2 GPUs of 96 GB; 6 vLLM engines, one a GPU, colocated with the FSDP-sharded policy,
    # gpu_memory_utilization 0.45, temperature 0.7
    "runtime.kind": "ray",
    "runtime.nodes": 3,
    "runtime.workers_per_node": 2,
    "runtime.device_memory_gb": 96.0,
    "runtime.engines": 6,
    "runtime.colocate": True,
    "rollout.engine": "vllm",
    "rollout.memory_utilization": 0.45,
    "rollout.temperature": 0.7,
    # adapter sync and preparation: through the shared file system mounted at `/shared`
    "runtime.shared_dir": "/shared",
    # machines: a head with 512 GB and no GPU, workers with 2 GPUs of 96 GB, 1200 GiB of shared storage
    "cluster.head_instance": "ml.r5d.16xlarge",
    "cluster.worker_instance": "ml.g7e.12xlarge",
    "cluster.storage_gib": 1200,
    # result: the best evaluation was at step 160
    "training.steps": 160,
}
# Not published; what the recipe is to say all the same.
CHOSEN: dict[str, Any] = {
    "model.dtype": "bfloat16",
    "model.device": "cuda",
    "model.lora.alpha": 32.0,
    "model.lora.vision": False,
    "rollout.max_new_tokens": 1024,
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.2,
    "algorithm.loss_reduction": "token_mean",
    "algorithm.kl_coef": 0.0,
    "training.prompts_per_step": 24,
    "training.minibatches": 2,
    "training.learning_rate": 3e-5,
    "training.gradient_checkpointing": True,
    "checkpoint.keep": 3,
}


def value(name: str, key: str) -> Any:
    found: Any = load_recipe(name)
    for part in key.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("key", PUBLISHED)
def test_hyperpod_is_the_published_run(key: str) -> None:
    assert value("hyperpod", key) == PUBLISHED[key]


@pytest.mark.parametrize("key", CHOSEN)
def test_what_was_chosen_for_hyperpod(key: str) -> None:
    assert value("hyperpod", key) == CHOSEN[key]


def source(name: str) -> str:
    return (resources.files("clew") / "recipes" / f"{name}.toml").read_text()


def written(tables: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in tables.items():
        if isinstance(inner, dict):
            yield from written(inner, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_the_file_says_which_values_are_published() -> None:
    """Every published value is written out, not left to a default, and marked; no other value is."""
    marked, table = set(), ""
    for line in source("hyperpod").splitlines():
        if line.startswith("["):
            table = line.split("]")[0].strip("[") + "."
        elif "=" in line.split("#")[0] and "(published)" in line:
            marked.add(table + line.split("=")[0].strip())
    assert set(written(tomllib.loads(source("hyperpod")))) >= set(PUBLISHED) | set(CHOSEN)
    assert marked == set(PUBLISHED)


def test_the_token_budget_ends_episodes_where_skyrls_does() -> None:
    """A conversation of up to 8192 tokens is answered, with up to 1024 more (see the comment in the recipe)."""
    assert value("hyperpod", "rollout.max_tokens") == 8192 + 1024
    assert value("hyperpod", "training.tokens_per_microbatch") >= 8192 + 1024


@pytest.mark.parametrize("gpus", range(1, 9))
def test_gpu_takes_one_to_eight(gpus: int) -> None:
    recipe = load_recipe("gpu", [f"runtime.workers_per_node={gpus}", f"runtime.engines={gpus}"])
    assert (recipe.runtime.nodes, recipe.model.device) == (1, "cuda")


def test_maze_keys_bind_native_mazes_only() -> None:
    """VisGym's mazes need up to 24 moves: bounds on paths are not asked of them."""
    load_recipe("hyperpod", ["environment.min_path=50", "environment.max_path=20"])


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_holds_known_keys_and_says_how_to_run_it(name: str) -> None:
    assert all(key in KEYS for key in written(tomllib.loads(source(name))))
    assert source(name).startswith("# ") and f"clew train {name}" in source(name)


@pytest.mark.parametrize("command", [["train"], ["cluster", "plan"], ["cluster", "render"], ["sft"], ["prepare"]])
def test_help_lists_what_ships(clew: Command, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert f"A recipe shipped with Clew ({', '.join(shipped_recipes())})" in clew(*command, "--help").out
