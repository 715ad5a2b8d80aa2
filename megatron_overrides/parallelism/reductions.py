"""The wrapper around the reduction of a tensor that has gaps in memory."""

from __future__ import annotations

import torch

from megatron_overrides.call import Call


def reduce_contiguous_copy(call: Call) -> torch.Tensor:
    """Wraps _reduce, which reduces a copy of a tensor with gaps and returns the tensor (NVIDIA/Megatron-LM#5338)."""
    if call["group"] is not None and call["group"].size() > 1:
        call["input_"] = call["input_"].contiguous()
    return call.proceed()
