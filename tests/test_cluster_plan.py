"""`clew cluster plan`: placement, and a memory budget that is held against independent counts and measurements."""

from __future__ import annotations

import json
import math
import warnings
from importlib import resources
from pathlib import Path

import pytest
import torch
from conftest import Command, Outcome
from hypothesis import given
from hypothesis import strategies as st

from clew.errors import UserError
from clew.policy.adapter import attach_lora, current_adapter
from clew.policy.model import load_model
from clew.policy.paths import resolve_model_path
from clew.recipe import Recipe, load_recipe
from clew.runtime import budget as budget_module
from clew.runtime.budget import GB, Budget, make_plan, microbatch_tokens
from clew.runtime.placement import place
from clew.runtime.sizes import episode_sizes, find_model


def ray(*overrides: str) -> Recipe:
    return load_recipe("laptop", ["runtime.kind=ray", *overrides])


def items(budget: Budget) -> dict[str, tuple[int, int]]:
    return {item.name: (item.playing, item.updating) for item in budget.items}


# --- placement -------------------------------------------------------------------------------------------


@given(st.data())
def test_everyone_is_placed_once_and_evenly(data: st.DataObject) -> None:
    nodes, workers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 8))
    colocate = data.draw(st.booleans())
    engines = data.draw(st.integers(1, nodes * workers if colocate else 40))
    placement = place(
        ray(
            f"runtime.nodes={nodes}",
            f"runtime.workers_per_node={workers}",
            f"runtime.engines={engines}",
            f"runtime.colocate={str(colocate).lower()}",
            "training.prompts_per_step=16",
        )
    )
    assert [device.rank for device in placement.ranks] == list(range(nodes * workers))
    assert [device.engine for device in placement.engines] == list(range(engines))
    assert [len(node.ranks) for node in placement.nodes] == [workers] * nodes
    counts = [len(node.engines) for node in placement.nodes]
    assert sum(counts) == engines and max(counts) - min(counts) <= 1
    for node in placement.nodes:
        assert [(d.node, d.index) for d in node.devices] == [(node.index, i) for i in range(len(node.devices))]
    shared = [d for d in placement.devices if d.rank is not None and d.engine is not None]
    assert len(shared) == (engines if colocate else 0)
    assert len(placement.devices) == nodes * workers + (0 if colocate else engines)
    if colocate and engines == nodes * workers:
        assert all(d.rank == d.engine for d in placement.devices)


def test_the_local_runtime_is_one_device() -> None:
    (device,) = place(load_recipe("laptop")).devices
    assert (device.rank, device.engine) == (0, 0)


# --- the budget ------------------------------------------------------------------------------------------


def test_shares_of_the_hyperpod_plan_by_hand() -> None:
    plan = make_plan(load_recipe("hyperpod"))
    (budget,) = plan.budgets
    found = items(budget)
    base, root, lora = plan.model.base, plan.model.root, plan.model.lora
    assert found["base, sharded"] == (math.ceil((base - root) * 4 / 6),) * 2
    assert found["base, whole on each"] == (2 * root,) * 2
    assert found["LoRA and optimizer"] == (math.ceil(lora * 16 / 6),) * 2
    assert found["gathered by FSDP"] == (0, 2 * 2 * 151936 * 4096)
    # 32 trajectories of 15 frames of 64 tokens; embeddings and three DeepStack layers of 4096 bfloat16 numbers
    assert found["visual features"] == (0, 32 * 15 * 64 * 4 * 4096 * 2)
    engine = [found[name] for name in ("engine: weights", "engine: working", "engine: key/value")]
    assert sum(playing for playing, _ in engine) == int(0.45 * 96e9)
    assert sum(updating for _, updating in engine) == found["engine: working"][1]  # the rest sleeps
    assert budget.playing == sum(p for p, _ in found.values()) and budget.updating == sum(u for _, u in found.values())
    # Even an engine that never slept would fit.
    assert budget.peak < budget.updating + int(0.45 * 96e9) < budget.memory == 96e9
    assert (plan.adapter, plan.head_lora) == (4 * lora, 12 * lora)
    assert plan.head_model == 4 * (base + lora)
    assert 30e9 < plan.head_model < 512e9


def test_the_adapter_and_the_optimizer_weigh_what_is_said() -> None:
    recipe = ray()
    plan = make_plan(recipe)
    vlm = load_model(resolve_model_path(recipe.model))
    policy = attach_lora(vlm, recipe.model.lora.rank, recipe.model.lora.alpha, 0.0)
    moved = sum(tensor.nbytes for tensor in current_adapter(policy, 0).tensors.values())
    assert plan.adapter == moved
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.ndim)
    assert plan.head_lora == moved + states
    gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    assert items(plan.budgets[0])["LoRA and optimizer"] == (moved + states + gradients,) * 2


def test_cache_bytes_of_the_8b_by_hand() -> None:
    plan = make_plan(load_recipe("hyperpod"))
    token = 0
    for _layer in range(36):
        for _head in range(8):
            token += 2 * 128 * 2  # a key and a value of 128 bfloat16 numbers
    assert plan.cache.token == token == 147456
    pool = 0.45 * 96e9 - 2 * (plan.model.base + plan.model.lora) - budget_module.ENGINE_OVERHEAD
    assert plan.cache.pool == int(pool)
    assert plan.cache.whole_episodes == pool // (token * 9216) == 16
    assert plan.cache.wanted == 192 // 6
    assert plan.cache.tokens_each == pool // (token * 32)


def test_one_rank_is_not_sharded_and_engines_apart_do_not_sleep() -> None:
    (budget,) = make_plan(load_recipe("gpu")).budgets
    assert items(budget)["base"] == (2 * 2127532032,) * 2
    assert "gathered by FSDP" not in items(budget)
    policy, engine = make_plan(load_recipe("hyperpod", ["runtime.engines=3", "runtime.colocate=false"])).budgets
    assert not any(name.startswith("engine") for name in items(policy))
    assert engine.playing == engine.updating == int(0.45 * 96e9)


def test_on_cpus_the_machine_holds_all_processes() -> None:
    one = make_plan(ray())
    two = make_plan(ray("runtime.workers_per_node=2", "runtime.engines=2"))
    assert len(one.budgets) == len(two.budgets) == 1 and not one.gpu
    first, second = items(one.budgets[0]), items(two.budgets[0])
    assert second["activations"] == (0, 2 * first["activations"][1])
    assert second["engine: weights"][0] == 2 * first["engine: weights"][0]
    assert second["engine: key/value"] == first["engine: key/value"]  # half the episodes each
    assert second["processes"][0] - first["processes"][0] == 2 * budget_module.PROCESS
    local = items(make_plan(load_recipe("laptop")).budgets[0])
    assert local["processes"][0] == budget_module.PROCESS and "Ray itself" not in local


def test_a_micro_batch_is_never_more_than_a_workers_share() -> None:
    recipe = ray("training.prompts_per_step=2", "algorithm.group_size=2", "training.minibatches=2")
    episode = episode_sizes(find_model(recipe), recipe)
    tokens, scored = microbatch_tokens(recipe, episode)
    assert tokens == 2 * episode.longest < recipe.training.tokens_per_microbatch
    assert scored >= 2 * 15 * 8  # every answer of both trajectories


# --- refusals --------------------------------------------------------------------------------------------


def refused(outcome: Outcome, *fragments: str) -> None:
    assert outcome.code == 2, outcome
    lines = outcome.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("clew: error: "), outcome.err
    for fragment in fragments:
        assert fragment in lines[0], lines[0]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["hyperpod", "runtime.engines=7"], ["runtime.engines = 7", "6 devices", "at most 6", "runtime.colocate"]),
        (["hyperpod", "training.minibatches=48"], ["training.minibatches = 48", "leaves 4 ", "6 policy workers"]),
        (["hyperpod", "rollout.memory_utilization=0.2"], ["0.2", "19.2 GB", "17.7 of weights", "raise"]),
        (
            ["hyperpod", "training.gradient_checkpointing=false"],
            ["device_memory_gb = 96", "activations 6", "updating", "set training.gradient_checkpointing = true"],
        ),
        (["hyperpod", "training.tokens_per_microbatch=40000"], ["logits", "lower training.tokens_per_microbatch"]),
        (["gpu", "model.path=Qwen/Qwen3-VL-8B-Instruct"], ["rollout.memory_utilization = 0.45", "10.8 GB", "17.7"]),
        (
            [
                *("gpu", "model.path=Qwen/Qwen3-VL-8B-Instruct"),
                *("runtime.device_memory_gb=40", "rollout.memory_utilization=0.6"),
            ],
            ["runtime.device_memory_gb = 40", "playing", "engine: weights 17.7, base 17.5", "more policy workers"],
        ),
        (["gpu", "model.path=Qwen/Qwen3-VL-32B-Instruct"], ["model.path", "32B", "clew prepare", "8B-Instruct"]),
        (["hyperpod", "model.subfolder=other"], ["VisGym/visgym_model (folder other)", "clew prepare"]),
        (["gpu", "model.path=./nowhere"], ["model.path", "./nowhere"]),
        (["laptop", "rollout.max_tokens=5000"], ["rollout.max_tokens = 5000", "4096 positions"]),
        (["laptop", "rollout.max_tokens=50"], ["rollout.max_tokens = 50", "46 tokens", "6 of them the frame"]),
        (["hyperpod", "model.lora.target=[\"nothing\"]"], ["model.lora.target", "nothing", "q_proj"]),
        (["hyperpod", "environment.id=no/Such-v0"], ["environment.id", "no/Such-v0"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(clew: Command, arguments: list[str], fragments: list[str]) -> None:
    refused(clew("cluster", "plan", *arguments), *fragments)


def test_a_machine_that_is_too_small_is_named(clew: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "machine_memory", lambda recipe: int(2 * GB))
    many = ["runtime.workers_per_node=4", "runtime.engines=4"]
    refused(clew("cluster", "plan", "laptop", "runtime.kind=ray", *many), "memory in GB = 2", "fewer processes")


def test_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    (tmp_path / "preprocessor_config.json").write_text(
        (resources.files("clew") / "assets" / "configs" / "preprocessor_config.json").read_text()
    )
    with pytest.raises(UserError, match="qwen2 model"):
        find_model(ray(f"model.path={tmp_path}"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="can't be read"):
        find_model(ray(f"model.path={tmp_path}"))


# --- what is printed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_the_hyperpod_plan_names_everyone(clew: Command, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of the libraries between the lines
        outcome = clew("cluster", "plan", "hyperpod")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= columns
    words = [line.split() for line in lines]
    assert ["head", "-", "no", "work", "(num-cpus", "0)"] in words
    placed = [line[-4:] for line in words if "GPU" in line]
    assert placed == [["GPU", str(i % 2), str(i), str(i)] for i in range(6)]
    said = " ".join(outcome.out.split())
    for fragment in (
        "3 nodes with 2 policy workers each, 6 engines (vllm) colocated with the workers",
        "24 tasks x 8 = 192 trajectories",
        "2 minibatches of 96, 16 a policy rank",
        "225 x 225 pixels is 64 tokens",
        "head 1.05 GB to consolidate the LoRA shards",
        "would take 35.42 GB",
        "adapter 349.18 MB",
        "of 96.0 GB",
    ):
        assert fragment in said, fragment
    assert words[[line[:1] for line in words].index(["total"])][1:3] == ["52.0", "42.1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["gpu"],
        ["gpu", "runtime.workers_per_node=8", "runtime.engines=8"],
        ["laptop"],
        ["laptop", "runtime.kind=ray"],
        ["laptop", "runtime.kind=ray", "rollout.engine=vllm", "runtime.workers_per_node=2", "runtime.engines=2"],
    ],
)
def test_other_plans_fit(clew: Command, arguments: list[str]) -> None:
    outcome = clew("cluster", "plan", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    assert any(line.startswith("fits") for line in outcome.out.splitlines())
    assert ("num-cpus 0" in outcome.out) == (arguments != ["laptop"])
