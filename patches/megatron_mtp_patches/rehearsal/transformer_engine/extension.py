"""Make the module that stands for `transformer_engine_torch`, TransformerEngine's compiled extension."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from . import (
    ORIGIN,
    activations,
    device,
    enums,
    fused_attention,
    moe,
    norms,
    optimizers,
    packed,
    products,
    rope,
    softmax,
)
from .kernel import refusal

_KERNELS = (
    device.KERNELS
    + products.KERNELS
    + norms.KERNELS
    + activations.KERNELS
    + softmax.KERNELS
    + rope.KERNELS
    + fused_attention.KERNELS
    + packed.KERNELS
    + moe.KERNELS
    + optimizers.KERNELS
)
# TransformerEngine looks these names up with hasattr() or a default, and works without them.
_OPTIONAL = {"grouped_mlp_experimental"}


def make() -> ModuleType:
    """Make the module. Autograd does not see its kernels; a kernel without a stand-in raises when it is called."""
    module = ModuleType("transformer_engine_torch", "Stands for TransformerEngine's compiled extension.")
    module.__spec__ = ModuleSpec(module.__name__, None, origin=ORIGIN)
    for type_ in enums.TYPES:
        setattr(module, type_.__name__, type_)
    for kernel in _KERNELS:
        setattr(module, kernel.__name__, torch.no_grad()(kernel))
    module.__getattr__ = _refuse  # type: ignore[method-assign]
    return module


def _refuse(name: str) -> Any:
    if name.startswith("__") or name in _OPTIONAL:
        raise AttributeError(name)
    return refusal(name)
