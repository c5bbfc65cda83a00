"""How vLLM is started: its settings, and what follows from the device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clew.errors import UserError
from clew.policy.model import ModelProcessor
from clew.rollout.lora_room import LORA_RANKS, lora_room

FORBIDDEN_KEY = "clew_forbidden_ids"  # under which vllm_mask finds the tokens that are never sampled
_CPU_BLOCK = 32  # tokens; with vLLM's 128, up to 127 tokens before each turn are computed again
_CPU_BATCH = 8192  # tokens of all requests that a step computes
_CPU_IMAGE_CACHE_GB = 1.0
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the mask is written for the first one, which runs on every device
}
"""Environment of every engine, of rollouts and of what is served."""


def as_asked(processor: ModelProcessor) -> dict[str, Any]:
    """Arguments of every engine, so that it samples what it is asked for and nothing that no agent may say."""
    return {
        "generation_config": "vllm",  # no top-k, top-p or penalties from generation_config.json
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, forbidden tokens masked out
        "logits_processors": ["clew.rollout.vllm_mask:ForbiddenTokens"],
        "additional_config": {FORBIDDEN_KEY: processor.forbidden_ids},
    }


def on_cpu(max_tokens: int) -> dict[str, Any]:
    """Arguments of every engine on a CPU.

    Args:
        max_tokens: of a sequence, prompt and answer.
    """
    return {
        "enforce_eager": True,
        # A seeded request whose prompt is computed in parts ends vLLM on a CPU ("CPU Generator does not use offset"):
        # prompts wait for a step with room for all of them.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_CPU_BATCH, max_tokens),
    }


@dataclass(frozen=True)
class VllmSettings:
    """What a vLLM engine is started with.

    Attributes:
        dtype: of weights and cache, ``float32`` or ``bfloat16``.
        max_tokens: of the longest trajectory, evaluation suites included.
        max_images: of the longest trajectory: one a turn.
        concurrent: episodes at a time.
        lora_rank: the largest rank of an adapter.
        memory_utilization: share of a GPU's memory for weights and cache; a CPU's cache is sized by what these
            settings can use.
        colocated: the device is a trainer's too, so the engine must be able to give it up (``sleep``).
        seed: of vLLM's own generator (no answer depends on it, each has a seed of its own).
    """

    dtype: str
    max_tokens: int
    max_images: int
    concurrent: int
    lora_rank: int
    memory_utilization: float
    colocated: bool = False
    seed: int = 0


def engine_options(
    processor: ModelProcessor, settings: VllmSettings, device: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments of vLLM's engine, and environment variables that must be set before vLLM is imported.

    All that depends on the device (``cpu`` or ``cuda``) is decided here.

    Raises:
        UserError: vLLM has no room for adapters of this rank, or the model for trajectories of this length.
    """
    if settings.lora_rank > LORA_RANKS[-1]:
        raise UserError(f"model.lora.rank: vLLM loads adapters up to rank {LORA_RANKS[-1]}, not {settings.lora_rank}")
    positions = processor.config.text_config.max_position_embeddings
    if settings.max_tokens > positions:
        raise UserError(
            f"rollout.max_tokens: the longest episodes of the recipe, those of larger suites included, may have "
            f"{settings.max_tokens} tokens and the model has {positions} positions: lower it, or leave such suites out"
        )
    arguments: dict[str, Any] = {
        "model": processor.path,
        "dtype": settings.dtype,
        "seed": settings.seed,
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.concurrent,
        "limit_mm_per_prompt": {"image": settings.max_images, "video": 0},
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_loras": 1,  # all requests of an engine are of one version; a new one takes its predecessor's place
        "max_lora_rank": lora_room(settings.lora_rank),
        **as_asked(processor),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    environment = ENVIRONMENT | {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if Path(processor.path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        text = processor.config.text_config
        token_bytes = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        token_bytes *= 4 if settings.dtype == "float32" else 2
        blocks = settings.concurrent * -(-settings.max_tokens // _CPU_BLOCK) + 1
        arguments |= {
            "block_size": _CPU_BLOCK,
            "kv_cache_memory_bytes": blocks * _CPU_BLOCK * token_bytes,
            "mm_processor_cache_gb": _CPU_IMAGE_CACHE_GB,
            **on_cpu(settings.max_tokens),
        }
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, on the threads that it was given
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # spares the first request 20 s of compiling a comparison
        }
    else:
        arguments |= {
            "gpu_memory_utilization": settings.memory_utilization,
            "enable_sleep_mode": settings.colocated,
        }
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # requests are prepared while the device computes
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        }
    return arguments, environment
