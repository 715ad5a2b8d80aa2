"""The wrappers that have Muon split the fused QKV weight of gated attention into query, gate, key and value.

NVIDIA/Megatron-LM#4728: these are orthogonalized separately. With `attention_output_gate`, the rows of the fused weight
of a query group are those of the queries, as many of the gate, then key and value. Megatron leaves the gate out of its
split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.norms.optimizer_tree import leaves


def insert_gate(call: Call) -> Any:
    """Wraps _get_qkv_split_shapes(model_cfg) of 0.18."""
    return _with_gate(call.proceed(), call["model_cfg"])


def split_gate_from_query(call: Call) -> Any:
    """Wraps get_megatron_muon_optimizer, which works out the shapes itself in 0.16 and 0.17."""
    optimizer = call.proceed()
    chunks = call.kwargs["model_chunks"] if "model_chunks" in call.kwargs else call.args[1]
    config = chunks[-1].config  # as there, the last one decides for all
    for leaf in leaves(optimizer):
        inner: Any = getattr(leaf, "optimizer", None)
        if getattr(inner, "qkv_split_shapes", None):
            inner.qkv_split_shapes = _with_gate(inner.qkv_split_shapes, config)
    return optimizer


def _with_gate(shapes: Sequence[int], config: Any) -> Sequence[int]:
    """`shapes` of query, key and value with one more of the query's size, for the gate, if `config` asks for a gate."""
    if not config.attention_output_gate or len(shapes) != 3:
        return shapes
    query, key, value = shapes
    return [query, query, key, value]
