"""What `clew cluster plan` computes with: parameters, tokens and bytes, against hand counts and what torch keeps."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoImageProcessor, AutoTokenizer, DynamicCache

from clew.algorithms import entropy_from_logprobs
from clew.envs.maze_env import FEEDBACK, MazeEnv, answer_text
from clew.evaluation.suites import environment_settings
from clew.policy.adapter import attach_lora
from clew.policy.model import collate, hidden_states, load_model, masked_log_softmax
from clew.policy.vision import FramePatcher, VisualFeatures
from clew.recipe import load_recipe
from clew.runtime.sizes import (
    activation_bytes,
    cache_bytes_per_token,
    episode_sizes,
    find_model,
    layer_activation_bytes,
    logit_bytes,
    model_sizes,
)

# Qwen3-VL-Instruct as published, written out by hand: hidden, MLP, layers, heads, key/value heads, tied;
# vision: hidden, MLP, blocks. Three DeepStack mergers each.
QWEN3_VL: dict[str, tuple[int, int, int, int, int, bool, int, int, int]] = {
    "2B": (2048, 6144, 28, 16, 8, True, 1024, 4096, 24),
    "4B": (2560, 9728, 36, 32, 8, True, 1024, 4096, 24),
    "8B": (4096, 12288, 36, 32, 8, False, 1152, 4304, 27),
}
VOCAB, HEAD = 151936, 128


# --- parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", QWEN3_VL)
def test_parameters_by_hand(size: str) -> None:
    hidden, mlp, layers, heads, kv, tied, v_hidden, v_mlp, blocks = QWEN3_VL[size]
    recipe = load_recipe("laptop", [f"model.path=Qwen/Qwen3-VL-{size}-Instruct", "model.lora.rank=32"])
    sizes = model_sizes(find_model(recipe), recipe)
    q, k = heads * HEAD, kv * HEAD
    linear = 2 * hidden * q + 2 * hidden * k + 3 * hidden * mlp
    layer = linear + 2 * hidden + 2 * HEAD
    embeddings = VOCAB * hidden
    block = 4 * v_hidden + 4 * v_hidden**2 + 4 * v_hidden + 2 * v_hidden * v_mlp + v_mlp + v_hidden
    wide = 4 * v_hidden
    merger = wide**2 + wide + wide * hidden + hidden
    patches = 3 * 2 * 16 * 16 * v_hidden + v_hidden + 2304 * v_hidden
    vision = patches + blocks * block + (2 * v_hidden + merger) + 3 * (2 * wide + merger)
    base = vision + layers * layer + hidden + (1 if tied else 2) * embeddings
    assert (sizes.base, sizes.vision) == (base, vision)
    published = {"2B": 2.127e9, "4B": 4.438e9, "8B": 8.767e9}[size]
    assert abs(sizes.base - published) < 0.001e9
    a_layer = 32 * (2 * (hidden + q) + 2 * (hidden + k) + 3 * (hidden + mlp))
    assert sizes.lora == layers * a_layer
    assert sizes.adapted == layers * linear
    # What FSDP gathers at once, and what it leaves whole.
    assert sizes.largest == (layer + a_layer if tied else embeddings)
    grouped = layers * layer + blocks * block + (0 if tied else 2 * embeddings)
    assert sizes.root == base - grouped


def test_the_shipped_configurations_are_the_published_ones() -> None:
    folder = resources.files("clew") / "assets" / "configs"
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "preprocessor_config.json",
        *(f"qwen3-vl-{size.lower()}-instruct.json" for size in QWEN3_VL),
    }
    for size, (hidden, mlp, layers, heads, kv, tied, v_hidden, v_mlp, blocks) in QWEN3_VL.items():
        config = json.loads((folder / f"qwen3-vl-{size.lower()}-instruct.json").read_text())
        text, vision = config["text_config"], config["vision_config"]
        assert (text["hidden_size"], text["intermediate_size"], text["num_hidden_layers"]) == (hidden, mlp, layers)
        assert (text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]) == (heads, kv, HEAD)
        assert config["tie_word_embeddings"] == text["tie_word_embeddings"] == tied
        assert (vision["hidden_size"], vision["intermediate_size"], vision["depth"]) == (v_hidden, v_mlp, blocks)
        assert vision["out_hidden_size"] == hidden


def test_a_folders_own_configuration_counts() -> None:
    recipe = load_recipe("laptop", [f"model.path={tiny.qwen_folder()}"])
    source = find_model(recipe)
    assert source.folder == tiny.qwen_folder().resolve()
    vlm = load_model(tiny.qwen_folder())
    sizes = model_sizes(source, recipe)
    assert sizes.base == sum(p.numel() for p in vlm.model.parameters())
    policy = attach_lora(vlm, 16, 32, 0.0)
    assert sizes.lora == sum(p.numel() for p in policy.parameters() if p.requires_grad)


# --- tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["package:warm-start", "qwen"])
def test_tokens_of_an_episode_are_those_of_the_chat_template(folder: str) -> None:
    path = str(tiny.qwen_folder()) if folder == "qwen" else folder
    recipe = load_recipe("laptop", [f"model.path={path}"])
    source = find_model(recipe)
    sizes = episode_sizes(source, recipe)
    assert not sizes.estimated
    env = MazeEnv(**environment_settings(recipe))
    frame = env.reset(3)[0].image
    grid = AutoImageProcessor.from_pretrained(source.folder)(images=[frame], return_tensors="pt")["image_grid_thw"]
    assert sizes.frame_tokens == int(grid.prod()) // 4
    tokenizer = AutoTokenizer.from_pretrained(source.folder)

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}

    answer = answer_text("left")
    longest = max(FEEDBACK.values(), key=lambda text: len(tokenizer(text)["input_ids"]))
    conversation = [user(env.prompt), {"role": "assistant", "content": answer}, user(longest)]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    whole = len(tokenizer(text)["input_ids"]) + 2 * (sizes.frame_tokens - 1)
    answered = len(tokenizer(answer, add_special_tokens=False)["input_ids"]) + 1  # and the end of turn
    assert whole == sizes.opening + answered + sizes.turn
    assert sizes.longest == sizes.opening + 14 * sizes.turn + 15 * recipe.rollout.max_new_tokens


@pytest.mark.parametrize(("level", "side", "tokens"), [("easy", 225, 64), ("hard", 275, 81)])
def test_visgyms_frames_under_qwens_processor(level: str, side: int, tokens: int) -> None:
    """65,536 pixels at least: 225 becomes 256 = 8 x 32, 275 becomes 288 = 9 x 32."""
    recipe = load_recipe("hyperpod", [f"environment.id=visgym:maze_2d/{level}"])
    source = find_model(recipe)
    sizes = episode_sizes(source, recipe)
    assert (sizes.frame, sizes.frame_tokens) == ((side, side), tokens)
    frame = np.zeros((side, side, 3), np.uint8)
    pixels = source.processor(images=[frame], return_tensors="pt")
    assert int(pixels["image_grid_thw"].prod()) // 4 == tokens
    assert FramePatcher(source.processor)(frame).pixels.shape == pixels["pixel_values"].shape
    assert sizes.estimated


# --- bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [tiny.tiny_folder, tiny.qwen_folder])
def test_cache_bytes_are_what_transformers_caches(folder: Any) -> None:
    vlm = load_model(folder())
    cache = DynamicCache()
    ids = torch.full((2, 7), 5)
    with torch.no_grad():
        vlm.model.model.language_model(input_ids=ids, past_key_values=cache, use_cache=True)
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert cache_bytes_per_token(vlm.model.config.text_config, 4) == kept // 14


def forward(folder: Path, dtype: torch.dtype, lora_dtype: torch.dtype, dropout: float, checkpointing: bool) -> Any:
    """A forward pass over 2 x 300 tokens with LoRA of rank 16, to be called; and the text configuration."""
    vlm = load_model(folder, dtype)
    policy = attach_lora(vlm, 16, 32, dropout)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(lora_dtype)
    if checkpointing:
        vlm.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    batch = collate([([5] * 300, [False] + [True] * 299, [])] * 2, vlm.template.image_token_id, 2)
    config = vlm.model.config.text_config
    features = VisualFeatures(torch.zeros(0, config.hidden_size), torch.zeros(3, 0, config.hidden_size))
    return config, vlm.model, lambda: hidden_states(vlm.model, batch, features)


def saved_bytes(model: torch.nn.Module, run: Any) -> int:
    """What autograd keeps of a forward pass, weights apart; a storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storage.nbytes() for storage in kept.values())


def peak_bytes(run: Any) -> int:
    """Most memory that torch had allocated at once, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


BOTH = pytest.mark.parametrize("folder", [tiny.tiny_folder, tiny.qwen_folder])


@BOTH
@pytest.mark.parametrize(
    ("dtype", "lora_dtype", "dropout"),
    [
        (torch.float32, torch.float32, 0.0),
        (torch.bfloat16, torch.bfloat16, 0.0),
        (torch.bfloat16, torch.float32, 0.0),
        (torch.float32, torch.float32, 0.1),
    ],
)
def test_what_a_layer_keeps_is_what_autograd_keeps(
    folder: Any, dtype: torch.dtype, lora_dtype: torch.dtype, dropout: float
) -> None:
    config, model, run = forward(folder(), dtype, lora_dtype, dropout, False)
    layer = layer_activation_bytes(config, 16, dtype.itemsize, lora_dtype.itemsize, dropout)
    kept = saved_bytes(model, run) / 600 / config.num_hidden_layers
    assert layer * (0.7 if dropout else 0.97) < kept < 1.05 * layer


@BOTH
def test_checkpointing_keeps_a_layers_input(folder: Any) -> None:
    config, model, run = forward(folder(), torch.float32, torch.float32, 0.0, True)
    inputs = 4 * config.hidden_size * (config.num_hidden_layers + 1)  # and the last norm's
    assert inputs <= saved_bytes(model, run) / 600 < 1.1 * inputs


@BOTH
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_an_upper_estimate_within_a_factor_of_two(folder: Any, checkpointing: bool) -> None:
    config, model, run = forward(folder(), torch.float32, torch.float32, 0.0, checkpointing)
    run().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    layer = layer_activation_bytes(config, 16, 4, 4)
    estimate = activation_bytes(config, 600, layer, 4, checkpointing=checkpointing)
    assert estimate / 2 < peak_bytes(lambda: run().sum().backward()) < estimate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_peak(dtype: torch.dtype) -> None:
    """As ``score`` computes them: logits, log-probabilities, entropy."""
    scored, vocab = 500, 4000
    hidden, weight = torch.randn(scored, 8, dtype=dtype, requires_grad=True), torch.randn(vocab, 8, dtype=dtype)

    def run() -> None:
        logits = torch.nn.functional.linear(hidden, weight)
        logprobs = masked_log_softmax(logits, torch.tensor([3, 4]), 0.7)
        picked = logprobs[:, 7].sum()
        with torch.no_grad():
            entropy_from_logprobs(logprobs)
        del logits, logprobs
        picked.backward()

    assert peak_bytes(run) == pytest.approx(logit_bytes(scored, vocab, dtype.itemsize), rel=0.05)
