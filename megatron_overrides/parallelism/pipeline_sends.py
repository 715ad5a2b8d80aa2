"""The wrapper that keeps what a pipeline stage sends in memory until it is sent."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call


def send_what_stays_in_memory(call: Call) -> Any:
    """Wraps _p2p_ops, whose sends are still going on when an interleaved schedule frees the outputs of a stage.

    NVIDIA/Megatron-LM#4047: it frees one by giving the tensor other data, so whoever holds the tensor holds nothing.
    An alias keeps the memory as long as the backend of torch.distributed, or the allocator for it, holds what it sends.
    """
    output = call["tensor_send_next"]
    if output is not None:
        call["tensor_send_next"] = output.detach()
    return call.proceed()
