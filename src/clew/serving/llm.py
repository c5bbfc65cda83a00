"""Ray Serve LLM with vLLM: what its engine is started with."""

from __future__ import annotations

from typing import Any

from clew.errors import UserError
from clew.policy.model import ModelProcessor
from clew.rollout.vllm_options import ENVIRONMENT, as_asked, on_cpu
from clew.serving.limits import Limits


def refuse_folder(adapters: str | None) -> None:
    """Raises UserError for adapters that are not in S3: Ray Serve LLM loads them from nowhere else."""
    if adapters is not None and not adapters.startswith("s3://"):
        raise UserError(
            f"--adapters {adapters}: with vLLM, adapters are loaded from S3 only; publish them with "
            "`clew export RUN --to s3://bucket/prefix`, or use --engine transformers"
        )


def llm_config(
    name: str,
    processor: ModelProcessor,
    adapters: str | None,
    max_adapters: int,
    context: int,
    gpu: bool,
    limits: Limits,
    replicas: int = 1,
) -> dict[str, Any]:
    """An ``LLMConfig`` of ``ray.serve.llm`` as a dict.

    Args:
        name: of the base model in requests; ``NAME:ADAPTER`` names an adapter.
        processor: of the model's folder.
        adapters: ``s3://bucket/prefix``, or None.
        context: tokens of prompt and answer.
        gpu: whether the engine has one; else vLLM's CPU build.
        replicas: engines. A fixed number: Serve LLM's own idea of a full one is 1e9 requests, so none is ever added.
    """
    engine: dict[str, Any] = {
        "dtype": "bfloat16" if gpu else "float32",
        "max_model_len": context,
        "limit_mm_per_prompt": {"image": limits.images, "video": 0},
        "max_num_seqs": limits.requests,
        **as_asked(processor),
    }
    environment = ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": name, "model_source": processor.path},
        "engine_kwargs": engine,
        "deployment_config": {"num_replicas": replicas, "max_ongoing_requests": 2 * limits.requests},
        "runtime_env": {"env_vars": environment},
    }
    if adapters is not None:
        config["lora_config"] = {
            "dynamic_lora_loading_path": adapters,
            "max_num_adapters_per_replica": max_adapters,
        }
        engine |= {"enable_lora": True, "max_loras": max_adapters, "max_lora_rank": limits.lora_rank}
    if not gpu:
        config["placement_group_config"] = {"bundles": [{"CPU": 1}]}
        engine |= {
            **on_cpu(context),
            # vLLM 0.29 asks for the architecture of the language model by itself there, and Qwen3-VL's names none.
            "hf_overrides": {"text_config": {"architectures": ["Qwen3VLForConditionalGeneration"]}},
        }
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return config
