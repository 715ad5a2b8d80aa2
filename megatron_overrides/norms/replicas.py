"""The rank that counts a parameter that tensor-parallel ranks, or those of Megatron-FSDP's no_shard, replicate."""

from __future__ import annotations

from typing import Any

import torch


def param_is_not_tensor_parallel_duplicate(param: Any, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
    """True if this rank counts `param`, a shard or the first of its replicas, in a norm.

    Args:
        param: a parameter, or its shard or main copy.
        tp_group: the tensor-parallel group of dense layers; None for the one of parallel_state.
        expert_tp_group: that of experts, over which their row biases are replicated (NVIDIA/Megatron-LM#5916). None
            for the one of parallel_state, so that a caller that knows only `tp_group` also counts them once
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


def first_replicas(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return those parameters whose gradients this rank counts: all but what no_shard replicates and another counts."""
    return [param for param in params if getattr(param, "_mtp_patches_is_first_replica", True)]
