"""Nothing depends on the tiny model: the 8B's real configuration, and a shrunken one with its tokens."""

from __future__ import annotations

import tiny
import torch
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from clew.policy.adapter import attach_lora, current_adapter
from clew.policy.model import assemble, load_model
from clew.recipe import AlgorithmTable, TrainingTable
from clew.rollout.engine import Sampling
from clew.rollout.episodes import Limits, Player, play
from clew.rollout.transformers_engine import TransformersEngine
from clew.training.samples import prepare
from clew.training.update import Sample, Updater


def config_8b() -> Qwen3VLConfig:
    """Qwen3-VL-8B-Instruct's numbers, written out by hand."""
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000000,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 4096,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        tie_word_embeddings=False,
    )


def test_lora_on_the_real_8b_configuration() -> None:
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config_8b())
    assert 8.7e9 < sum(p.numel() for p in model.parameters()) < 8.9e9
    tokenizer = AutoTokenizer.from_pretrained(tiny.qwen_folder())
    vlm = assemble(
        "Qwen/Qwen3-VL-8B-Instruct", model, tokenizer, AutoImageProcessor.from_pretrained(tiny.qwen_folder())
    )
    assert vlm.merge_size == 2
    policy = attach_lora(vlm, 32, 64.0, 0.0)
    trainable = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    assert not any("visual" in n for n in trainable)
    assert len(trainable) == 36 * 7 * 2
    a_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288)
    assert sum(p.numel() for p in trainable.values()) == 36 * 32 * a_layer
    assert policy.peft_config["default"].base_model_name_or_path == "Qwen/Qwen3-VL-8B-Instruct"


def test_the_layout_is_qwens() -> None:
    vlm = load_model(tiny.qwen_folder())
    ids = {t: vlm.tokenizer.convert_tokens_to_ids(t) for t in tiny.QWEN_IDS}
    assert ids == tiny.QWEN_IDS
    assert (ids["<|im_end|>"], ids["<|vision_start|>"], ids["<|image_pad|>"]) == (151645, 151652, 151655)
    assert len(vlm.tokenizer) == 151669
    assert vlm.template.end_of_turn_id == 151645
    assert vlm.model.lm_head.weight is not vlm.model.model.language_model.embed_tokens.weight


def test_a_shrunken_8b_plays_and_learns() -> None:
    """Temporal patches, grouped-query attention, untied embeddings, 151,936 tokens: a whole step."""
    vlm = load_model(tiny.qwen_folder())
    base = tiny.weights_digest(vlm.model)
    policy = attach_lora(vlm, 4, 8, 0.0)
    cache = tiny.feature_cache(vlm)
    engine = TransformersEngine(vlm, cache)
    env = tiny.WordEnv(sizes=((64, 64), (64, 96)))
    training = TrainingTable(steps=1, prompts_per_step=3, learning_rate=0.02)
    updater = Updater(vlm, policy, cache, AlgorithmTable(group_size=3), training, 0.8, 2000)
    engine.load_adapter(current_adapter(policy, 0))
    trajectories = play(
        engine,
        Player(vlm.template, vlm.patcher),
        lambda: tiny.WordEnv(sizes=((64, 64), (64, 96))),
        [(env.task(seed), k) for seed in range(3) for k in range(3)],
        Sampling(0.8, 8),
        Limits(2000),
        ("shapes", 3),
    )
    assert all(len(t.grids) == len(t.turns) for t in trajectories)
    assert max(len(t.turns) for t in trajectories) > 1
    samples, used = prepare(trajectories, AlgorithmTable(group_size=3))
    if not any(used):  # what matters is the update, whoever won
        samples = [Sample(s.trajectory, [(-1.0) ** i] * len(s.trajectory.turns)) for i, s in enumerate(samples)]
        used = [True] * len(samples)
    metrics = updater.update(samples, used, 1)
    assert metrics["train/updates"] == 1
    assert metrics["policy/logprob_gap_max"] < 1e-4
    assert metrics["train/grad_norm"] > 0
    new = current_adapter(policy, 1)
    assert all((v.abs().max() > 0) for v in new.tensors.values())
    assert tiny.weights_digest(policy.unload()) == base
