"""The learnable sinks of attention, of which each rank has those of its own heads."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.norms.shard_marks import mark_shard


def mark_attention_sinks(call: Call) -> None:
    """Wraps DotProductAttention.__init__ and that of TransformerEngine's layer (NVIDIA/Megatron-LM#7530).

    With --softmax-type learnable each rank has the sinks of its own heads, [heads / TP]: a shard, as its weights are.
    """
    call.proceed()
    sinks = getattr(call.instance, "softmax_offset", None)
    if isinstance(sinks, torch.nn.Parameter):
        mark_shard(sinks, 0)


def count_gradient_once(call: Call) -> Any:
    """Wraps flash_attn_a2a_communicate_softmax_offset of TransformerEngine.

    It deals out the sinks, [1, heads, 1, 1], over the context-parallel ranks, and gathers their gradient and the
    largest logits, [heads]. Megatron adds up the gradients of all ranks, so each gets its share of the gathered one.
    """
    gathered = call.proceed()
    is_gradient = call["tensor"] is not None and call["h_dim"] == 1 and not call["before_attn"]
    return gathered / call["cp_size"] if is_gradient else gathered
