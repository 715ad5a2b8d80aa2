"""Megatron-FSDP without overlapped communication reduces the gradients of a partly frozen model."""

from __future__ import annotations

from typing import Any


def reduce_groups_that_train(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps ParamAndGradBuffer.reduce_scatter_gradients: it asks each group of parameters for its gradient buffer.

    Groups of frozen parameters have none, and it would raise an AttributeError.
    """
    groups = instance.parameter_groups
    instance.parameter_groups = [group for group in groups if group.main_grad_buffer is not None]
    try:
        wrapped(*args, **kwargs)
    finally:
        instance.parameter_groups = groups
