"""The tiny model: a real Qwen3-VL, small enough for a laptop CPU, saved as an ordinary Hugging Face folder.

Same architecture as Qwen3-VL-8B (vision tower with 2-D rope, patch mergers, DeepStack, interleaved M-RoPE, QK-norm);
only the numbers are small. Weights are random: ``clew sft`` trains them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

# The special tokens Clew relies on, in Qwen's order; then the added (non-special) answer tags.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ANSWER_TAGS = ("<action>", "</action>")  # added tokens, as Qwen's own <tool_call> is

# Qwen2's pre-tokenizer pattern.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen3-VL's chat format for what agents need: system, user and assistant turns, text and images in any order.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# About 1 / sqrt(width). Qwen's 0.02 suits widths in the thousands; here it costs a hundred steps of silence.
_INIT_STD = 0.1


def train_tokenizer(corpus: list[str], vocab_size: int = 512) -> Tokenizer:
    """Byte-level BPE in Qwen's layout: bytes and merges first, then special tokens and answer tags."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(ANSWER_TAGS),
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ANSWER_TAGS])
    return tokenizer


def tiny_config(tokenizer: Tokenizer) -> Qwen3VLConfig:
    """The tiny Qwen3-VL's configuration: about 1.8 million parameters."""
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
    return Qwen3VLConfig(
        text_config={
            "vocab_size": vocab_size,
            "initializer_range": _INIT_STD,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,  # the smallest that vLLM's CPU attention supports
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "initializer_range": _INIT_STD,
            "depth": 6,
            "hidden_size": 96,
            "intermediate_size": 384,
            "num_heads": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "out_hidden_size": 96,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [1, 3, 5],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def build_tiny_model(folder: Path, corpus: list[str], seed: int = 0, max_pixels: int = 512 * 512) -> None:
    """Writes a tiny Qwen3-VL with random weights: config, safetensors, tokenizer, template, processor configs.

    Args:
        folder: where to write; made if missing.
        corpus: texts the tokenizer is trained on (the environment's prompt, feedback and answers).
        seed: of the random weights.
        max_pixels: of a frame; larger ones are scaled down.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus)
    config = tiny_config(tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.token_to_id("<|im_end|>")
    model.generation_config.pad_token_id = tokenizer.token_to_id("<|endoftext|>")
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    vision = config.vision_config
    image_processor = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        # Qwen's default lower limit would enlarge these small frames four-fold.
        "size": {"shortest_edge": 32 * 32, "longest_edge": max_pixels},
    }
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": config.text_config.max_position_embeddings,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen3VLProcessor",
            **image_processor,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
            **image_processor,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
