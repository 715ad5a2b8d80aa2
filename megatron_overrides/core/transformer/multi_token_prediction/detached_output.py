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
    if weight is not None:
        weight = weight.detach()
    if isinstance(output_layer, torch.nn.Module):
        with _detached_parameters(output_layer):
            return output_layer(hidden, weight=weight, **arguments)
    if weight is None:
        weight = output_layer.weight.detach()  # type: ignore[attr-defined]
    return output_layer(hidden, weight=weight, **arguments)


@contextmanager
def _detached_parameters(module: torch.nn.Module) -> Iterator[None]:
    """Replace the parameters of `module` by detached views while its forward runs.

    Hooks that gather parameters before the forward and release them after it (FSDP) see the real parameters.
    """
    replaced: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = []

    def detach(*_: Any) -> None:
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    replaced.append((child._parameters, name, parameter))
        for parameters, name, parameter in replaced:
            parameters[name] = parameter.detach()

    def restore(*_: Any) -> None:
        while replaced:
            parameters, name, parameter = replaced.pop()
            parameters[name] = parameter

    # detach() runs after FSDP's own pre-hook (parameters are gathered), restore() before its post-hook releases them.
    handles = (
        module.register_forward_pre_hook(detach),
        module.register_forward_hook(restore, prepend=True, always_call=True),
    )
    try:
        yield
    finally:
        restore()
        for handle in handles:
            handle.remove()
