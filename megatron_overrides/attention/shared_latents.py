"""Gradients of what all heads of multi-latent attention (MLA) read, where each tensor-parallel rank has some heads.

The down projection makes a latent key-value vector and one positional key for all heads: [tokens, batch, kv_lora_rank +
qk_pos_emb_head_dim]. The up projection adds up the gradient of the latent vector over the ranks. The positional key
goes to the heads of a rank as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call


def sum_gradients_of_shared_latents(call: Call) -> Any:
    """Wraps get_query_key_value_tensors of MLA layers with a down projection for keys and values alone.

    NVIDIA/Megatron-LM#1699, #6839. A layer of absorbed MLA needs it for a split projection alone: it refuses to run
    without sequence parallelism, and sums the gradients of all that it gathers.
    """
    projection = getattr(call.instance, "linear_kv_down_proj", None)
    if projection is None or not _is_trained_in_parallel(call.instance):
        return call.proceed()

    def share(_module: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return share_latents(call.instance, outputs[0]), outputs[1]

    hook = projection.register_forward_hook(share)
    try:
        return call.proceed()
    finally:
        hook.remove()


def sum_gradients_of_fused_latents(call: Call) -> Any:
    """Wraps _qkv_down_projection of MLA layers with --mla-down-proj-fusion (0.17 and later)."""
    query, latents = call.proceed()
    return query, share_latents(call.instance, latents) if _is_trained_in_parallel(call.instance) else latents


def share_latents(layer: Any, latents: torch.Tensor) -> torch.Tensor:
    """The latents of a layer, whole, with a gradient that has the parts of all ranks' heads.

    A rank's columns of them are gathered here: Megatron would gather them later, and drop the gradient that the heads
    of this rank have for the columns of the others. The result is [tokens / TP, ...] with sequence parallelism, as
    that of a duplicated projection: Megatron gathers the positional key from there and adds up its gradient.
    """
    from megatron.core.tensor_parallel.mappings import (
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    config, group = layer.config, layer.tp_group
    if latents.size(-1) != config.kv_lora_rank + config.qk_pos_emb_head_dim:
        latents = gather_from_tensor_model_parallel_region(latents, group)
        if config.sequence_parallel:
            return scatter_to_sequence_parallel_region(latents, group)
    if config.sequence_parallel:
        return latents
    return SumLastColumns.apply(latents, config.qk_pos_emb_head_dim, group)


class SumLastColumns(torch.autograd.Function):
    """The identity; the gradient of the last `columns` of a tensor is added up over a group."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, columns: int, group: Any) -> torch.Tensor:
        ctx.columns, ctx.group = columns, group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        kept, part = gradient.split([gradient.size(-1) - ctx.columns, ctx.columns], dim=-1)
        part = part.contiguous()
        torch.distributed.all_reduce(part, group=ctx.group)
        return torch.cat([kept, part], dim=-1), None, None


def _is_trained_in_parallel(layer: Any) -> bool:
    from megatron.core.utils import get_pg_size

    return torch.is_grad_enabled() and get_pg_size(layer.tp_group) > 1
