"""Refuse runs in which QK clipping cannot work, before it has scaled a weight."""

from __future__ import annotations

from typing import Any

import torch

_ADVICE = "leave --qk-clip out (--log-max-attention-logit measures without clipping)"
_SCOPES_WITH_ATTENTION = {"", "full", "full_iteration", "attn"}  # of CUDA graphs; "" is where none is given


def check_run(settings: Any) -> None:
    """Raise ValueError if Megatron's arguments ask for --qk-clip and for what does not go with it."""
    if not getattr(settings, "qk_clip", False):
        return
    for name, reason in (
        ("use_megatron_fsdp", "shards the weights that are to be scaled"),
        ("use_torch_fsdp2", "shards the weights that are to be scaled"),
        ("overlap_param_gather_with_optimizer_step", "still gathers weights while they are scaled"),
    ):
        if getattr(settings, name, False):
            raise ValueError(f"--qk-clip: --{name.replace('_', '-')} {reason}; leave one of the two out")
    if getattr(settings, "transformer_impl", None) == "local":
        raise ValueError(
            "--qk-clip: --transformer-impl local has attention that does not report its largest logits; give "
            "--transformer-impl transformer_engine, or leave --qk-clip out"
        )
    check_graphs(settings)


def check_graphs(config: Any) -> None:
    """Raise ValueError if CUDA graphs replay attention: its largest logits reach no Python then."""
    if getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False):
        scopes = {""}
    elif str(getattr(config, "cuda_graph_impl", None) or "none") == "none":
        return
    else:
        names = ("cuda_graph_scope", "cuda_graph_modules", "cuda_graph_scope_deprecated")  # the last one: from 0.18 on
        asked = next(filter(None, (getattr(config, name, None) for name in names)), "")
        scopes = {getattr(scope, "name", str(scope)) for scope in ([asked] if isinstance(asked, str) else asked)}
    if scopes & _SCOPES_WITH_ATTENTION:
        raise ValueError(
            "--qk-clip reads the largest logits of each step, which a CUDA graph of attention does not report: give "
            f"--cuda-graph-scope (--cuda-graph-modules) without attention, turn CUDA graphs off, or {_ADVICE}"
        )


def check_weights(layer: Any, weights: dict[str, torch.nn.Parameter], rows: dict[str, int]) -> None:
    """Raise ValueError if weights of an attention layer are sharded or lack the rows that their clipping rule expects.

    Args:
        weights: {name of a linear layer: its weight}
        rows: {name of a linear layer: how many rows its weight has on this rank}
    """
    from torch.distributed.tensor import DTensor

    where = f"layer {layer.layer_number} ({type(layer).__name__})"
    for name, weight in weights.items():
        if isinstance(weight, DTensor):
            raise ValueError(f"--qk-clip: {name} of {where} is sharded (Megatron-FSDP, FSDP2); {_ADVICE}")
        if weight.size(0) != rows[name]:
            raise ValueError(
                f"--qk-clip: {name} of {where} has {weight.size(0)} rows, where its heads have {rows[name]}; {_ADVICE}"
            )
