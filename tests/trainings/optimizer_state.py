"""Count what this rank's part of an optimizer updates, and the bytes of its state."""

from __future__ import annotations

from typing import Any

import torch


def state_bytes(optimizer: Any) -> int:
    """Bytes of the tensors in the state of `optimizer`, a MegatronOptimizer, on this rank."""
    from megatron_overrides.norms.optimizer_tree import leaves

    states = [state for leaf in leaves(optimizer) if leaf.optimizer for state in leaf.optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(local(tensor).nbytes for tensor in tensors)


def shard_elements(optimizer: Any) -> int:
    """How many elements the part of `optimizer` on this rank updates."""
    return sum(local(param).numel() for param in optimizer.get_parameters())


def local(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that this rank has; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)
