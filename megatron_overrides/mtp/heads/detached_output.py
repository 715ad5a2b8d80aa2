"""Call the output layer so that a gradient passes through it and its parameters get none: for detached MTP heads.

NVIDIA/Megatron-LM#3456. Upstream detaches `output_layer.weight` from outside. That misses a bias and adapters (LoRA),
fails on wrappers without a `weight`, and under FSDP takes the weight before it is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def call_detached(
    output_layer: Callable[..., Any], hidden: torch.Tensor, *, weight: torch.Tensor | None, **arguments: Any
) -> Any:
    """Return `output_layer(hidden, weight=weight, ...)`; its backward reaches `hidden` and no parameter."""
    if isinstance(output_layer, torch.nn.Module):
        with detached_calls(output_layer, lambda: True):
            return output_layer(hidden, weight=weight, **arguments)
    weight = output_layer.weight if weight is None else weight  # type: ignore[attr-defined]
    return output_layer(hidden, weight=weight.detach(), **arguments)


@contextmanager
def detached_calls(module: torch.nn.Module, is_detached: Callable[[], bool]) -> Iterator[None]:
    """Replace the parameters of `module`, and a `weight` that it is given, by detached views in its forwards.

    Hooks that gather parameters before the forward and release them after it (FSDP) see the real parameters.

    Args:
        is_detached: asked at each call of `module`, whether this one is.
    """
    replaced: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = []

    def detach(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if not is_detached():
            return None
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    replaced.append((child._parameters, name, parameter))
        for parameters, name, parameter in replaced:
            parameters[name] = parameter.detach()
        weight = kwargs.get("weight")
        return args, kwargs if weight is None else {**kwargs, "weight": weight.detach()}

    def restore(*_: Any) -> None:
        while replaced:
            parameters, name, parameter = replaced.pop()
            parameters[name] = parameter

    # detach() runs after FSDP's own pre-hook (parameters are gathered), restore() before its post-hook releases them.
    handles = (
        module.register_forward_pre_hook(detach, with_kwargs=True),
        module.register_forward_hook(restore, prepend=True, always_call=True),
    )
    try:
        yield
    finally:
        restore()
        for handle in handles:
            handle.remove()
