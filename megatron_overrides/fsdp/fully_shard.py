"""The optimizer state that `fully_shard_optimizer` creates for checkpoints to load into.

NVIDIA/Megatron-LM#5976: it does so by a step with gradients of zero. Adam then takes the first real step for the
second, and weight decay shrinks the parameters once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_overrides.call import Call


def create_state_without_a_step(call: Call) -> torch.optim.Optimizer:
    """Wraps fully_shard_optimizer: its step is one with a learning rate and a weight decay of zero, and not counted."""
    optimizer = call["optimizer"]
    settings = [
        (group, {name: group[name] for name in ("lr", "weight_decay") if name in group})
        for group in optimizer.param_groups
    ]
    counts = {id(place): _copy(place["step"]) for place in _places_with_steps(optimizer)}
    for group, values in settings:
        group.update({name: _zero_like(value) for name, value in values.items()})
    try:
        return call.proceed()
    finally:
        for group, values in settings:
            group.update(values)
        for place in _places_with_steps(optimizer):
            place["step"] = counts.get(id(place), _zero_like(place["step"]))


def _places_with_steps(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """The dictionaries that count steps: the parameters' states in PyTorch's optimizers, the groups in FusedAdam."""
    for place in (*optimizer.param_groups, *optimizer.state.values()):
        if "step" in place:
            yield place


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _zero_like(value: Any) -> Any:
    """Zero as a tensor where `value` is one: a capturable optimizer needs its learning rate on the device."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
