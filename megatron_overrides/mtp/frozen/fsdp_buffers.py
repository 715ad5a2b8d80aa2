"""Megatron-FSDP without overlapped communication reduces the gradients of a partly frozen model."""

from __future__ import annotations

from megatron_overrides.call import Call


def reduce_groups_that_train(call: Call) -> None:
    """Wraps ParamAndGradBuffer.reduce_scatter_gradients: it asks each group of parameters for its gradient buffer.

    Groups of frozen parameters have none, and it would raise an AttributeError.
    """
    groups = call.instance.parameter_groups
    call.instance.parameter_groups = [group for group in groups if group.main_grad_buffer is not None]
    try:
        call.proceed()
    finally:
        call.instance.parameter_groups = groups
