"""The place of a parameter in the gathered state of a distributed optimizer (NVIDIA/Megatron-LM#5077).

The state of a buffer is gathered without the padding at the end of each bucket. Its index of parameters counts that
padding, so from the second bucket on it points behind each parameter.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron_overrides.call import Call


def without_padding(buffer: Any) -> Any:
    """A copy of `buffer` that shares its tensors, and whose index of parameters leaves out the padding of buckets."""
    shifts, unpadded = {}, 0
    for bucket in buffer.buckets:
        shifts[bucket.bucket_id] = bucket.offset - unpadded
        unpadded += bucket.numel_unpadded
    if not any(shifts.values()):
        return buffer
    packed = copy.copy(buffer)
    packed.param_index_map = {
        param: (start - shifts[bucket_id], end - shifts[bucket_id], bucket_id)
        for param, (start, end, bucket_id) in buffer.param_index_map.items()
    }
    return packed


def save_own_state_of_each_param(call: Call) -> Any:
    """Wraps DistributedOptimizer.sharded_param_state_fully_reshardable, which indexes the gathered state of buffers."""
    optimizer = call.instance
    buffers = optimizer.buffers
    optimizer.buffers = [without_padding(buffer) for buffer in buffers]
    try:
        return call.proceed()
    finally:
        optimizer.buffers = buffers
