"""Gradients of learnable attention sinks under context parallelism."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call


def count_gradient_once(call: Call) -> Any:
    """Wraps flash_attn_a2a_communicate_softmax_offset of TransformerEngine.

    It deals out the sinks, [1, heads, 1, 1], over the context-parallel ranks, and gathers their gradient and the
    largest logits, [heads]. Megatron adds up the gradients of all ranks, so each gets its share of the gathered one.
    """
    gathered = call.proceed()
    is_gradient = call["tensor"] is not None and call["h_dim"] == 1 and not call["before_attn"]
    return gathered / call["cp_size"] if is_gradient else gathered
