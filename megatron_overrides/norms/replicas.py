"""Which parameters are replicas, and what their shards and main copies inherit from them."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.moe.expert_parameters import mark_expert_parameters
from megatron_overrides.norms.norm_groups import tag, tag_of


def param_is_not_tensor_parallel_duplicate(param: Any, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
    """Whether this rank counts `param`, a shard or the first of its replicas, in a norm.

    Args:
        param: a parameter, or its shard or main copy.
        tp_group: the tensor-parallel group of dense layers; None for the one of parallel_state.
        expert_tp_group: that of experts, over which their row biases are replicated (NVIDIA/Megatron-LM#5916). None
            for the one of parallel_state, so that a caller that knows only `tp_group` counts them once, too
            (NVIDIA/Megatron-LM#6099).
    """
    from megatron.core import parallel_state

    if getattr(param, "tensor_model_parallel", False):
        return True
    if not getattr(param, "allreduce", True):
        expert_tp_group = expert_tp_group or parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
        tp_group = expert_tp_group or tp_group
    rank = parallel_state.get_tensor_model_parallel_rank() if tp_group is None else tp_group.rank()
    return bool(rank == 0)


def copy_grad_norm_tags(call: Call) -> None:
    """Wraps copy_tensor_model_parallel_attributes(destination, source), called for every shard and main copy."""
    call.proceed()
    group = tag_of(call["source_tensor"])
    if group is not None:
        tag(call["destination_tensor"], group)


def copy_expert_mark(call: Call) -> None:
    """Wraps copy_tensor_model_parallel_attributes(destination, source): a shard of an expert's parameter stays one."""
    call.proceed()
    if hasattr(call["source_tensor"], "allreduce"):
        call["destination_tensor"].allreduce = call["source_tensor"].allreduce


def mark_experts_of_column_layer(call: Call) -> None:
    """Wraps ColumnParallelLinear.__init__ and TEColumnParallelLinear.__init__: marks the parameters of an expert's."""
    _mark_experts_of_layer("column", call)


def mark_experts_of_row_layer(call: Call) -> None:
    """Wraps RowParallelLinear.__init__ and TERowParallelLinear.__init__: marks the parameters of an expert's."""
    _mark_experts_of_layer("row", call)


def _mark_experts_of_layer(parallel_mode: str, call: Call) -> None:
    call.proceed()
    if call.get("is_expert"):
        mark_expert_parameters(call.instance, parallel_mode, call["config"])
