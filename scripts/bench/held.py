"""Count the bytes that this rank holds for a model and its optimizer, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch


class Held(NamedTuple):
    """Bytes on this rank. `main_weights` are the optimizer's parameters where they are not the model's own."""

    parameters: int
    gradients: int
    main_weights: int
    optimizer_state: int


def held(chunks: Iterable[Any], optimizer: Any) -> Held:
    """Count what `chunks`, models in Megatron's DDP or Megatron-FSDP, and `optimizer` hold.

    Megatron's buffers count with their padding, everything else by its elements.
    """
    parameters: list[torch.Tensor] = []
    gradients: list[Any] = []
    main_weights: list[torch.Tensor] = []
    for chunk in chunks:
        if hasattr(chunk, "param_and_grad_buffer"):  # Megatron-FSDP
            groups = chunk.param_and_grad_buffer.parameter_groups
            parameters += [group.model_weight_buffer.data for group in groups if group.model_weight_buffer]
            gradients += [group.main_grad_buffer.data for group in groups if group.main_grad_buffer]
            main_weights += [group.main_weight_buffer.data for group in groups if group.main_weight_buffer]
        else:
            storages = {param.untyped_storage().data_ptr(): param.untyped_storage() for param in chunk.parameters()}
            parameters += [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
            gradients += [buffer.grad_data for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    if not main_weights:
        own = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        optimized = [param.data for param in optimizer.get_parameters()]
        main_weights = [tensor for tensor in optimized if tensor.untyped_storage().data_ptr() not in own]
    return Held(_bytes(parameters), _bytes(gradients), _bytes(main_weights), state_bytes(optimizer))


def state_bytes(optimizer: Any) -> int:
    """Bytes of the tensors in the state of `optimizer`, a MegatronOptimizer, on this rank."""
    from megatron_overrides.norms.optimizer_tree import leaves

    states = [state for leaf in leaves(optimizer) if leaf.optimizer for state in leaf.optimizer.state.values()]
    return _bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))


def shard_elements(optimizer: Any) -> int:
    """How many elements the part of `optimizer` on this rank updates."""
    return sum(local(param).numel() for param in optimizer.get_parameters())


def local(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that this rank has; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)
