"""LoRA adapters: attached to the language model, moved bit for bit, and understood by plain PEFT."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from clew.errors import UserError
from clew.policy.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapter,
    attach_lora,
    current_adapter,
    read_adapter,
    tensors_hash,
    write_adapter,
)
from clew.policy.export import adapter_effect, export_adapter
from clew.policy.model import VisionLanguageModel, load_model
from clew.rollout.transformers_engine import TransformersEngine


def trained(vlm: VisionLanguageModel, rank: int = 4, steps: int = 2, **options: Any) -> PeftModel:
    """An attached adapter after a few fake steps: gradients of noise."""
    policy = attach_lora(vlm, rank, 2 * rank, 0.0, **options)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return policy


@torch.no_grad()
def logits(model: Any, vlm: VisionLanguageModel) -> torch.Tensor:
    trajectory = tiny.conversation(vlm, ["up", "<action>left</action>"])
    model.get_base_model().model.rope_deltas = None
    return model(**tiny.plain_inputs(vlm, trajectory.token_ids, [t.frame for t in trajectory.turns])).logits


def test_only_the_language_model_is_adapted_and_it_starts_as_the_base() -> None:
    vlm = tiny.tiny()
    base = tiny.weights_digest(vlm.model)
    plain = tiny.conversation(vlm, ["up"])
    inputs = tiny.plain_inputs(vlm, plain.token_ids, [plain.turns[0].frame])
    with torch.no_grad():
        before = vlm.model(**inputs).logits
    policy = attach_lora(vlm, 4, 8, 0.0)
    assert not policy.training and not any(m.training for m in policy.modules())
    names = [n for n, p in policy.named_parameters() if p.requires_grad]
    assert names and all(".language_model.layers." in n and ".lora_" in n for n in names)
    leaves = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n in names}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    vlm.model.model.rope_deltas = None
    with torch.no_grad():
        assert torch.equal(vlm.model(**inputs).logits, before)
    assert tiny.weights_digest(policy.unload()) == base


def test_the_initial_adapter_depends_on_its_seed_alone() -> None:
    torch.manual_seed(1)
    one = current_adapter(attach_lora(tiny.tiny(), 4, 8, 0.0, seed=3), 0)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two = current_adapter(attach_lora(tiny.tiny(), 4, 8, 0.0, seed=3), 0)
    assert torch.equal(torch.get_rng_state(), state)
    other = current_adapter(attach_lora(tiny.tiny(), 4, 8, 0.0, seed=4), 0)
    assert one.content_hash == two.content_hash != other.content_hash
    assert one.name == two.name == f"step-000000-{one.content_hash[:8]}"


def test_targets_by_name() -> None:
    adapter = current_adapter(attach_lora(tiny.tiny(), 2, 4, 0.0, target=("q_proj", "v_proj")), 0)
    assert {k.split(".lora_")[0].rsplit(".", 1)[-1] for k in adapter.tensors} == {"q_proj", "v_proj"}
    with pytest.raises(UserError, match=r"model\.lora\.target"):
        attach_lora(tiny.tiny(), 2, 4, 0.0, target=("qq_proj",))


def test_vision_is_adapted_only_if_asked_and_refused_where_it_cannot_be_applied() -> None:
    vlm = tiny.tiny()
    adapter = current_adapter(attach_lora(vlm, 2, 4, 0.0, vision=True), 0)
    assert any(".visual." in k for k in adapter.tensors) and any(".language_model." in k for k in adapter.tensors)
    with pytest.raises(UserError, match="outside the language model"):
        TransformersEngine(tiny.shared_tiny(), tiny.feature_cache(tiny.shared_tiny())).load_adapter(adapter)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    """Train a step, snapshot, write, read: every bit comes back."""
    policy = trained(tiny.tiny())
    adapter = current_adapter(policy, 12)
    write_adapter(adapter, tmp_path)
    read = read_adapter(tmp_path)
    assert read.content_hash == adapter.content_hash
    assert read.tensors.keys() == adapter.tensors.keys()
    for name, tensor in read.tensors.items():
        assert torch.equal(tensor, adapter.tensors[name])


def test_a_snapshot_is_a_copy() -> None:
    policy = trained(tiny.tiny())
    adapter = current_adapter(policy, 1)
    before = adapter.content_hash
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 1.0
    assert adapter.content_hash == before != current_adapter(policy, 1).content_hash


@pytest.mark.parametrize("make", [tiny.tiny_folder, tiny.qwen_folder])
def test_plain_peft_gives_the_same_logits(tmp_path: Path, make: Any) -> None:
    vlm = load_model(make())
    policy = trained(vlm)
    write_adapter(current_adapter(policy, 1), tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert config["base_model_name_or_path"] == str(make())
    stock = AutoModelForImageTextToText.from_pretrained(config["base_model_name_or_path"]).eval()
    loaded = PeftModel.from_pretrained(stock, tmp_path)
    ours, theirs = logits(policy, vlm), logits(loaded, vlm)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with loaded.disable_adapter():
        assert (logits(loaded, vlm) - theirs).abs().max() > 0.1  # it does something


def test_merged_equals_unmerged() -> None:
    vlm = tiny.tiny()
    policy = trained(vlm)
    adapter = current_adapter(policy, 1)
    merged = tiny.tiny()
    modules = dict(merged.model.model.language_model.named_modules())
    with torch.no_grad():
        for name, delta in adapter.deltas():
            modules[name].weight += delta
    policy_logits = logits(policy, vlm)
    wrapped = attach_lora(merged, 1, 1, 0.0)  # fresh: changes nothing, gives the same interface
    torch.testing.assert_close(logits(wrapped, merged), policy_logits, rtol=1e-5, atol=2e-4)
    reference = policy.merge_and_unload()
    for name, module in reference.model.language_model.named_modules():
        if name in dict(adapter.deltas()):
            torch.testing.assert_close(modules[name].weight, module.weight, rtol=0, atol=1e-5)


def test_rank_stabilised_scale_is_pefts(tmp_path: Path) -> None:
    policy = trained(tiny.tiny())
    adapter = current_adapter(policy, 1)
    write_adapter(dataclasses.replace(adapter, config={**adapter.config, "use_rslora": True}), tmp_path)
    stock = AutoModelForImageTextToText.from_pretrained(tiny.tiny_folder())
    base = {n: m.weight.clone() for n, m in stock.model.language_model.named_modules() if hasattr(m, "weight")}
    merged = PeftModel.from_pretrained(stock, tmp_path).merge_and_unload().model.language_model
    for name, delta in read_adapter(tmp_path).deltas():
        torch.testing.assert_close(base[name] + delta, merged.get_submodule(name).weight, rtol=0, atol=1e-5)


def test_what_cannot_be_merged_is_refused() -> None:
    adapter = current_adapter(trained(tiny.tiny()), 1)
    a = next(k for k in adapter.tensors if "lora_A" in k)
    b = a.replace("lora_A", "lora_B")

    def changed(tensors: dict[str, Any] | None = None, **config: Any) -> Adapter:
        return Adapter("x", {**adapter.tensors, **(tensors or {})}, {**adapter.config, **config})

    for bad, named in [
        (changed(use_dora=True), "use_dora"),
        (changed(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (changed({"base_model.model.lm_head.weight": torch.zeros(2, 2)}), "lm_head"),
        (Adapter("x", {k: v for k, v in adapter.tensors.items() if k != b}, adapter.config), "other half"),
        (Adapter("x", {}, adapter.config), "no lora_A"),
        (
            Adapter(
                "x",
                {k.replace("base_model.model.", ""): v for k, v in adapter.tensors.items()},
                adapter.config,
            ),
            None,
        ),
    ]:
        if named is None:
            assert dict(bad.deltas()).keys() == dict(adapter.deltas()).keys()
        else:
            with pytest.raises(UserError, match=named):
                list(bad.deltas())


def test_the_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    vlm = tiny.shared_tiny()
    engine = TransformersEngine(vlm, tiny.feature_cache(vlm))
    untouched = tiny.weights_digest(engine._language_model)
    other = load_model(tiny.qwen_folder())
    foreign = current_adapter(trained(other), 1)
    with pytest.raises(UserError, match="does not fit"):
        engine.load_adapter(foreign)
    assert tiny.weights_digest(engine._language_model) == untouched
    assert engine.version == "base"


def test_engine_merges_and_unmerges_exactly() -> None:
    """Whatever was loaded, the base comes back bit for bit; a second adapter does not add to the first."""
    vlm = tiny.tiny()
    one = current_adapter(trained(vlm, steps=1), 1)
    engine = TransformersEngine(vlm, tiny.feature_cache(vlm))  # made while LoRA layers are attached and trained
    base = tiny.weights_digest(TransformersEngine(tiny.tiny(), tiny.feature_cache(vlm))._language_model)
    assert tiny.weights_digest(engine._language_model) == base
    assert not any("lora" in name for name, _ in engine._language_model.named_modules())
    two = Adapter("two", {k: 2 * v for k, v in one.tensors.items()}, one.config)
    engine.load_adapter(one)
    after_one = tiny.weights_digest(engine._language_model)
    engine.load_adapter(two)
    assert engine.version == "two"
    engine.load_adapter(one)
    assert tiny.weights_digest(engine._language_model) == after_one != base
    engine.load_adapter(None)
    assert tiny.weights_digest(engine._language_model) == base
    assert engine.version == "base"


def test_content_hash_sees_names_shapes_types_and_bits() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    same = {"b": torch.ones(2), "a": torch.arange(6.0).view(2, 3)}
    assert tensors_hash(tensors) == tensors_hash(same)
    changed = [
        {"a": tensors["a"].view(3, 2), "b": tensors["b"]},
        {"c": tensors["a"], "b": tensors["b"]},
        {"a": tensors["a"].bfloat16(), "b": tensors["b"]},
        {"a": torch.nextafter(tensors["a"], torch.tensor(9.0)), "b": tensors["b"]},
        {"a": tensors["a"]},
    ]
    assert len({tensors_hash(t) for t in [tensors, *changed]}) == 6
    assert tensors_hash({"a": tensors["a"].T.contiguous().T, "b": tensors["b"]}) == tensors_hash(tensors)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (WEIGHTS_FILE, None),
        (CONFIG_FILE, None),
        (WEIGHTS_FILE, b"\x10\x00\x00\x00\x00\x00\x00\x00garbage"),
        (WEIGHTS_FILE, b""),
        (CONFIG_FILE, b"{not json"),
        (CONFIG_FILE, b"{}"),
        (CONFIG_FILE, b"[1]"),
    ],
)
def test_broken_folders_are_named(tmp_path: Path, file: str, content: bytes | None) -> None:
    write_adapter(current_adapter(attach_lora(tiny.tiny(), 2, 4, 0.0), 0), tmp_path)
    read_adapter(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError, match="adapter") as raised:
        read_adapter(tmp_path)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_cut_weight_file_is_named(tmp_path: Path) -> None:
    write_adapter(current_adapter(attach_lora(tiny.tiny(), 2, 4, 0.0), 0), tmp_path)
    weights = tmp_path / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="damaged"):
        read_adapter(tmp_path)


# --- export ----------------------------------------------------------------------------------------------

CARD = {
    "base_model": "base",
    "base_sha256": "0" * 64,
    "step": 1,
    "recipe": "r",
    "seed": 0,
    "environment": {"id": "test/Word"},
    "evaluation": {"solved": 3, "total": 4, "ci95": [0.3, 0.95]},
}


def test_the_effect_of_an_adapter_is_proven(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vlm = tiny.tiny()
    fresh = attach_lora(vlm, 4, 8, 0.5)
    assert adapter_effect(vlm, fresh, tiny.WordEnv()) == 0.0
    adapter = current_adapter(fresh, 0)
    export_adapter(adapter, tmp_path / "fresh", CARD, 0.0)
    assert "changes no logit" in caplog.text
    assert "NO EFFECT" in (tmp_path / "fresh" / "README.md").read_text()
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    # The same number each time although training drops out: an export written again must be the same.
    effects = {adapter_effect(vlm, fresh, tiny.WordEnv()) for _ in range(3)}
    assert len(effects) == 1 and effects.pop() > 0.01


def test_an_export_is_never_overwritten(tmp_path: Path) -> None:
    policy = trained(tiny.tiny())
    adapter = current_adapter(policy, 1)
    folder = export_adapter(adapter, tmp_path / "step-000001", CARD, 0.5)
    export_adapter(adapter, folder, CARD, 0.5)
    assert read_adapter(folder).content_hash == adapter.content_hash
    card = (folder / "README.md").read_text()
    assert adapter.content_hash in card and "3/4" in card and "NO EFFECT" not in card
    # Other weights of the same step (a device that does not repeat its bits): both stay.
    other = Adapter("o", {k: v + 1 for k, v in adapter.tensors.items()}, adapter.config)
    export_adapter(other, folder, CARD, 0.5)
    assert read_adapter(folder).content_hash == other.content_hash
    assert read_adapter(tmp_path / "step-000001.superseded-1").content_hash == adapter.content_hash
