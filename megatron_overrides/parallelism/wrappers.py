"""The wrappers around Megatron's communication: reductions, process groups and sends between pipeline stages."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch

from megatron_overrides.call import Call


def reduce_contiguous_copy(call: Call) -> torch.Tensor:
    """Wraps _reduce, which reduces a copy of a tensor with gaps and returns the tensor (NVIDIA/Megatron-LM#5338)."""
    if call["group"] is not None and call["group"].size() > 1:
        call["input_"] = call["input_"].contiguous()
    return call.proceed()


def order_groups_alike(call: Call) -> list[dict[str, Any]]:
    """Wraps _get_param_groups, which sorts groups by their overrides, and leaves others as this rank has met them.

    NVIDIA/Megatron-LM#6616: of two groups with the same overrides, that of dense parameters comes before that of
    experts, on all ranks.
    """
    not_overrides = ("params", "is_expert_parallel")
    alike = itertools.groupby(
        call.proceed(), lambda group: {name: group[name] for name in group if name not in not_overrides}
    )
    return [group for _, groups in alike for group in sorted(groups, key=operator.itemgetter("is_expert_parallel"))]


def send_what_stays_in_memory(call: Call) -> Any:
    """Wraps _p2p_ops, whose sends are still going on when an interleaved schedule frees the outputs of a stage.

    NVIDIA/Megatron-LM#4047: it frees one by giving the tensor other data, so whoever holds the tensor holds nothing.
    An alias keeps the memory as long as the backend of torch.distributed, or the allocator for it, holds what it sends.
    """
    output = call["tensor_send_next"]
    if output is not None:
        call["tensor_send_next"] = output.detach()
    return call.proceed()
