"""The output layer as the MTP heads use it when they are detached: it hands on a gradient and keeps none.

NVIDIA/Megatron-LM#3456. Upstream detaches `output_layer.weight` from outside, which misses a bias and adapters (LoRA),
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
    """`output_layer(hidden, weight=weight, ...)` whose backward reaches `hidden` and no parameter."""
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
    """While the forward of `module` runs, its parameters are detached views of themselves.

    Only while it runs: hooks that gather parameters before it and release them after it (FSDP) see their own.
    """
    replaced: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = []

    def detach(*_: Any) -> None:
        for child in module.modules():
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    replaced.append((child._parameters, name, parameter))
        for parameters, name, parameter in replaced:
            parameters[name] = parameter.detach()

    def put_back(*_: Any) -> None:
        while replaced:
            parameters, name, parameter = replaced.pop()
            parameters[name] = parameter

    # Last before the forward, first after it.
    handles = (
        module.register_forward_pre_hook(detach),
        module.register_forward_hook(put_back, prepend=True, always_call=True),
    )
    try:
        yield
    finally:
        put_back()
        for handle in handles:
            handle.remove()
