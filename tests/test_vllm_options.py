"""What of the vLLM engine needs no vLLM: how it is started, its prompts, which adapters it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_vllm_engine import SETTINGS, adapted, stored

from clew.checkpoint import DamagedCheckpoint, write_directory
from clew.errors import UserError
from clew.policy.adapter import WEIGHTS_FILE, StoredAdapter
from clew.policy.model import ModelProcessor, load_model, load_processor
from clew.policy.paths import resolve_model_path
from clew.recipe import ModelTable
from clew.rollout.vllm_engine import VllmEngine, check_adapter, collapse
from clew.rollout.vllm_options import FORBIDDEN_KEY, VllmSettings, engine_options

IMAGE = 7


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(resolve_model_path(ModelTable(path="package:warm-start")))


@pytest.fixture(scope="module")
def processor(folder: Path) -> ModelProcessor:
    return load_processor(folder)


@given(st.lists(st.tuples(st.lists(st.integers(0, 6), min_size=1), st.integers(1, 9)), max_size=5))
def test_collapse_leaves_one_placeholder_an_image(parts: list[tuple[list[int], int]]) -> None:
    expanded = [token for text, count in parts for token in [*text, *[IMAGE] * count]]
    assert collapse(expanded, IMAGE) == [token for text, _ in parts for token in [*text, IMAGE]]


def test_the_processor_is_the_models(folder: Path, processor: ModelProcessor) -> None:
    vlm = load_model(folder)
    assert processor.forbidden_ids == vlm.forbidden_ids.tolist()
    assert processor.template.opening("a", "b", 3) == vlm.template.opening("a", "b", 3)
    frame = tiny.noise(1, 50, 90)
    assert torch.equal(processor.patcher(frame).pixels, vlm.patcher(frame).pixels)
    with pytest.raises(UserError, match=r"model\.path"):
        load_processor(folder / "absent")


def test_switches_follow_the_device(processor: ModelProcessor) -> None:
    cpu, cpu_environment = engine_options(processor, SETTINGS, "cpu")
    gpu, gpu_environment = engine_options(
        processor, VllmSettings("bfloat16", 4096, 15, 32, 33, 0.45, colocated=True), "cuda"
    )
    for arguments in (cpu, gpu):
        assert arguments["generation_config"] == "vllm" and arguments["logprobs_mode"] == "processed_logprobs"
        assert arguments["additional_config"] == {FORBIDDEN_KEY: processor.forbidden_ids}
        assert arguments["limit_mm_per_prompt"] == {"image": 15, "video": 0}
    # Keys and values of 64 whole trajectories, in blocks: 2 * layers * heads * head_dim * 4 bytes a token.
    assert cpu["kv_cache_memory_bytes"] == (64 * 1024 + 32) * 2 * 3 * 2 * 32 * 4
    assert cpu["enforce_eager"] and "gpu_memory_utilization" not in cpu and "enable_sleep_mode" not in cpu
    assert cpu_environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and cpu_environment["HF_HUB_OFFLINE"] == "1"
    assert gpu["gpu_memory_utilization"] == 0.45 and gpu["enable_sleep_mode"] and "enforce_eager" not in gpu
    assert gpu["max_lora_rank"] == 64 and cpu["max_lora_rank"] == 16
    assert gpu_environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    with pytest.raises(UserError, match=r"model\.lora\.rank"):
        engine_options(processor, VllmSettings("float32", 64, 1, 1, 513, 0.45), "cpu")
    with pytest.raises(UserError, match=r"rollout\.max_tokens: .* 4097 tokens and the model has 4096 positions"):
        engine_options(processor, VllmSettings("float32", 4097, 1, 1, 16, 0.45), "cpu")


def test_without_vllm_there_is_a_clear_word(processor: ModelProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clew.rollout.vllm_engine.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"clew\[vllm\]"):
        VllmEngine(processor, SETTINGS, "cpu")


def damage(folder: Path, change: Any) -> Path:
    """A copy of an adapter folder with other weights, whole as far as its manifest can tell."""
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)

    def write(staging: Path) -> None:
        save_file(tensors, staging / WEIGHTS_FILE)
        shutil.copy(folder / "adapter_config.json", staging)

    other = folder.with_name(f"{folder.name}-{len(list(folder.parent.iterdir()))}")
    write_directory(other, write, {})
    return other


def test_adapters_that_vllm_would_not_apply_whole_are_refused(
    folder: Path, processor: ModelProcessor, tmp_path: Path
) -> None:
    _, adapter = adapted(folder, 1)
    whole = stored(adapter, tmp_path)
    check_adapter(whole, processor, 4)
    key = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    cases: list[tuple[Any, str]] = [
        (lambda t: t.update({key.replace("layers.0", "layers.3"): t[key].clone()}), r"can't apply .*layers\.3"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2)}), "can't apply .*lm_head"),
        (lambda t: t.update({key: t[key][:, 1:].contiguous()}), "does not fit the model"),
        (lambda t: t.update({key: t[key][1:].contiguous()}), "does not fit the model"),
        (lambda t: t.pop(key), r"lacks lora_A or lora_B"),
        (lambda t: t.clear(), r"lacks lora_A or lora_B"),
    ]
    for change, message in cases:
        with pytest.raises(UserError, match=message):
            check_adapter(StoredAdapter("x", damage(whole.folder, change)), processor, 4)
    with pytest.raises(UserError, match="started for rank 2"):
        check_adapter(whole, processor, 2)
    _, vision = adapted(folder, 2, vision=True)
    with pytest.raises(UserError, match=r"can't apply .*visual"):
        check_adapter(stored(vision, tmp_path), processor, 4)
    config = json.loads((whole.folder / "adapter_config.json").read_text())
    (whole.folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    with pytest.raises(DamagedCheckpoint, match="adapter_config"):
        check_adapter(whole, processor, 4)
