"""The wrappers around Muon: gated attention, and the scale of Newton-Schulz' input.

NVIDIA/Megatron-LM#4728: query, gate, key and value are orthogonalized separately. With `attention_output_gate`, the
rows of the fused weight of a query group are those of the queries, as many of the gate, then key and value. Megatron
leaves the gate out of its split.

Newton-Schulz of an input whose norm is smaller than the floor that it divides by: the input is multiplied by a power of
two before it is squared, which changes no digit of it. So squares do not underflow, and there is no host-device sync to
find out whether the input is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.norms.optimizer_tree import leaves

# The square of a norm under the floor, times this squared, is a float32 for any floor up to 10.
_LIFT = 2.0**60


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


def rescale_small_input(call: Call) -> torch.Tensor:
    """Wraps newton_schulz(x, ..., eps, ..., tp_group): float32 matrices [m, n] or [batch, m, n], whole on this rank.

    With a tp_group, `x` is a shard, and normalize_with_rescaling does this with the norm over all shards.
    """
    x = call["x"]
    if call["tp_group"] is None and x.dtype == torch.float32 and x.ndim in (2, 3):  # it refuses all others
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        call["x"] = x * _factor(norm, call["eps"])
    return call.proceed()


def normalize_with_rescaling(call: Call) -> torch.Tensor:
    """Wraps distributed_normalize_p2(x, eps, group): `x` divided by its norm over `group`, or by `eps` if that is more.

    One reduction, as there: of the norm, and of the norm of the larger `x`.
    """
    x, eps, group = call["x"], call["eps"], call["group"]
    lifted = x * _LIFT
    squares = torch.stack([(x * x).sum(), (lifted * lifted).sum()])
    torch.distributed.all_reduce(squares, op=torch.distributed.ReduceOp.SUM, group=group)
    norm, lifted_norm = torch.sqrt(squares)
    small = norm < eps
    return torch.where(small, lifted, x) / torch.where(small, lifted_norm, norm).clamp_min(eps)


def _factor(norm: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.where(norm < eps, _LIFT, 1.0)
