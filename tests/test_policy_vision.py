"""Frames become exactly what the model folder's own image processor and vision tower make of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from clew.errors import UserError
from clew.policy import vision
from clew.policy.model import load_model
from clew.policy.vision import FeatureCache, FramePatcher, encode


def processor(folder: Path, **changes: Any) -> Any:
    """The tiny folder's image processor with changed settings, loaded as Hugging Face loads it."""
    content = json.loads((tiny.tiny_folder() / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**content, **changes}))
    return AutoImageProcessor.from_pretrained(folder)


@pytest.mark.parametrize("make", [tiny.tiny_folder, tiny.qwen_folder])
def test_folders_load_with_the_auto_classes(make: Any) -> None:
    folder = make()
    model = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    image_processor = AutoImageProcessor.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert image_processor.patch_size == model.config.vision_config.patch_size
    assert image_processor.temporal_patch_size == model.config.vision_config.temporal_patch_size
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == model.config.image_token_id
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert len(tokenizer) <= model.config.text_config.vocab_size


def test_tiny_tokenizer_is_the_one_that_was_written() -> None:
    """The Auto class may rebuild a tokenizer from its class; ids must be those of tokenizer.json."""
    from tokenizers import Tokenizer

    written = Tokenizer.from_file(str(tiny.tiny_folder() / "tokenizer.json"))
    loaded = AutoTokenizer.from_pretrained(tiny.tiny_folder())
    for text in (
        "<action>up</action>",
        "Blocked by a wall.\nWalk on  it",
        "äß 12 a'll <|im_end|>\n<|im_start|>",
        "\t x\r\n",
    ):
        assert loaded(text, add_special_tokens=False)["input_ids"] == written.encode(text).ids
        assert loaded.decode(written.encode(text).ids) == text


SIZES = [(64, 64), (96, 64), (96, 96)]
ODD_SIZES = [(50, 70), (20, 20), (33, 95), (400, 640), (64, 65)]


@pytest.mark.parametrize("temporal", [1, 2])
@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("size", SIZES + ODD_SIZES)
def test_patches_equal_the_processors(tmp_path: Path, size: tuple[int, int], merge: int, temporal: int) -> None:
    theirs = processor(tmp_path, merge_size=merge, temporal_patch_size=temporal)
    frame = tiny.noise(3, *size)
    patches = FramePatcher(theirs)(frame)
    expected = theirs(images=[frame], return_tensors="pt")
    assert patches.grid == tuple(expected["image_grid_thw"][0].tolist())
    assert torch.equal(patches.pixels, expected["pixel_values"])
    assert FramePatcher(theirs).grid(frame) == patches.grid


@pytest.mark.parametrize(
    "changes",
    [
        {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
        {"rescale_factor": 1 / 127.5},
        {"do_normalize": False},
        {"patch_size": 8},
        {"size": {"shortest_edge": 256 * 256, "longest_edge": 1024 * 1024}},  # Qwen's own lower limit enlarges
    ],
)
def test_patches_follow_the_folders_settings(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = processor(tmp_path, **changes)
    frame = tiny.noise(4, 64, 96)
    expected = theirs(images=[frame], return_tensors="pt")
    patches = FramePatcher(theirs)(frame)
    assert patches.grid == tuple(expected["image_grid_thw"][0].tolist())
    assert torch.equal(patches.pixels, expected["pixel_values"])


def test_identity_sizes_take_the_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = tiny.shared_tiny().patcher
    monkeypatch.setattr(patcher, "processor", None)  # would raise if called
    assert patcher(tiny.noise(0, 96, 64)).grid == (1, 6, 4)
    with pytest.raises(TypeError):
        patcher(tiny.noise(0, 50, 64))


@pytest.mark.parametrize("make", [tiny.tiny_folder, tiny.qwen_folder])
@pytest.mark.parametrize("sizes", [[(64, 64)] * 5, [(64, 64), (96, 64), (64, 64)], [(64, 96)]])
def test_batched_attention_equals_the_stock_loop(make: Any, sizes: list[tuple[int, int]]) -> None:
    vlm = load_model(make())
    stock = AutoModelForImageTextToText.from_pretrained(make()).eval()
    patches = [vlm.patcher(tiny.noise(i, *size)) for i, size in enumerate(sizes)]
    ours = encode(vlm.model.model.visual, patches)
    theirs = encode(stock.model.visual, patches)
    assert "_batched_attention" in str(vlm.model.model.visual.blocks[0].attn.forward)
    assert "_batched_attention" not in str(stock.model.visual.blocks[0].attn.forward)
    torch.testing.assert_close(ours.embeds_NH, theirs.embeds_NH, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.deepstack_KNH, theirs.deepstack_KNH, rtol=1e-4, atol=1e-5)


def test_batched_attention_has_the_stock_gradients() -> None:
    vlm, stock = tiny.tiny(), AutoModelForImageTextToText.from_pretrained(tiny.tiny_folder()).eval()
    patches = [vlm.patcher(tiny.noise(i)) for i in range(3)]
    for visual in (vlm.model.model.visual, stock.model.visual):
        encode(visual, patches).embeds_NH.square().mean().backward()
    for ours, theirs in zip(vlm.model.model.visual.parameters(), stock.model.visual.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(SIZES[:2])), min_size=1, max_size=7))
def test_cache_gives_each_frames_own_features(shown: list[tuple[int, tuple[int, int]]]) -> None:
    """Whatever order, repetition and mix of sizes frames come in, each gets the features it has alone."""
    vlm = tiny.shared_tiny()
    frames = [tiny.noise(seed, *size) for seed, size in shown]
    cache = FeatureCache(vlm.model.model.visual, vlm.patcher, batch=2)
    for part in (frames[:2], frames):  # the second call finds some known and some not
        found = cache.gather(part)
        alone = [encode(vlm.model.model.visual, [vlm.patcher(f)]) for f in part]
        torch.testing.assert_close(found.embeds_NH, torch.cat([f.embeds_NH for f in alone]), rtol=1e-4, atol=1e-5)
        deep = torch.cat([f.deepstack_KNH for f in alone], dim=1)
        torch.testing.assert_close(found.deepstack_KNH, deep, rtol=1e-4, atol=1e-5)
    assert len(cache) == len(set(shown))
    cache.clear()
    assert len(cache) == 0


def test_cache_encodes_each_distinct_frame_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = tiny.shared_tiny()
    encoded = []

    def counting(visual: Any, patches: list[Any]) -> Any:
        encoded.append(len(patches))
        return encode(visual, patches)

    monkeypatch.setattr(vision, "encode", counting)
    cache = tiny.feature_cache(vlm)
    a, b = tiny.noise(0), tiny.noise(1)
    cache.gather([a, b, a.copy(), b])
    cache.gather([b, a])
    assert encoded == [2]
    assert not cache.gather([a]).embeds_NH.requires_grad
    # Same bytes, other shape: another frame.
    cache.gather([np.ascontiguousarray(tiny.noise(0, 64, 96)), tiny.noise(0, 64, 96).reshape(96, 64, 3)])
    assert sum(encoded) == 4


def test_unloadable_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path"):
        load_model(tmp_path / "absent")
    for missing in ("preprocessor_config.json", "model.safetensors", "config.json"):
        folder = tmp_path / missing
        shutil.copytree(tiny.tiny_folder(), folder)
        (folder / missing).unlink()
        with pytest.raises(UserError, match=r"model\.path.*" + str(missing)[:5]):
            load_model(folder)
    other = tmp_path / "llama"
    shutil.copytree(tiny.tiny_folder(), other)
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="llama"):
        load_model(other)


def test_damaged_weights_are_a_users_error(tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny.tiny_folder(), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model\.path"):
        load_model(folder)


def test_a_folder_without_chat_template_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "silent"
    shutil.copytree(tiny.tiny_folder(), folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="chat template"):
        load_model(folder)
