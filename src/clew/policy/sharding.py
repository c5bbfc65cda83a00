"""The policy spread over several ranks with FSDP2."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from clew.policy.model import VisionLanguageModel


def shard(vlm: VisionLanguageModel, ranks: int, dtype: torch.dtype, device: str) -> None:
    """Shards a model in place: each decoder layer and vision block is a group, so are embeddings and output layer.

    The model may be on the CPU: a group is moved as it is sharded, so that no device ever holds the whole.

    Call it after LoRA is attached and before an optimizer is made. Weights must be float32: FSDP2 wants one dtype in a
    group, and LoRA is trained in float32. Gathered weights have the dtype ``dtype``, gradients are reduced in float32.
    What is left (norms, patch embedding, mergers: frozen and small) stays whole on every rank.

    Args:
        ranks: how many; the default process group must have as many.
        dtype: of the computation.
        device: ``cuda`` or ``cpu``.
    """
    mesh = init_device_mesh(device, (ranks,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    base = vlm.model
    groups = [*base.model.language_model.layers, *base.model.visual.blocks]
    if base.lm_head.weight is not base.model.language_model.embed_tokens.weight:
        groups += [base.model.language_model.embed_tokens, base.lm_head]
    for parameter in base.parameters():
        if parameter.requires_grad:  # as PEFT makes them on a base of that dtype: every rank count starts alike
            parameter.data = parameter.data.to(dtype).float()
    for module in groups:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    sharded = {id(parameter) for module in groups for parameter in module.parameters()}
    for parameter in base.parameters():
        if id(parameter) not in sharded:
            parameter.data = parameter.data.to(device, dtype)
    for module in base.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)
    vlm.forbidden_ids = vlm.forbidden_ids.to(device)
