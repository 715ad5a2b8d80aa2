"""Layer 2: what a tensor reports about its device, and the Python functions that take a device.

The dispatcher gets a device only after Python has parsed it, and a build without CUDA (or without a driver) refuses
'cuda' and integer devices when it parses them. Hence the thin wrappers. For a CPU tensor `is_cuda` is True and `type()`
is 'torch.cuda.*Tensor', because Megatron's optimizers sort parameters by them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .dispatcher import CPU, cpu_for_cuda

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace", "normal", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros",
    "zeros_like",
)  # fmt: skip
_native_to = torch.Tensor.to
_native_type = torch.Tensor.type


def install() -> None:
    """Wrap the factories and the methods of Tensor, and make torch.load restore CUDA storages on the CPU."""
    for name in _FACTORIES:
        setattr(torch, name, _resolve_device(getattr(torch, name)))
    overrides = {
        "to": _to,
        "cuda": lambda self, *args, **kwargs: _native_to(self, CPU),
        "type": _type,
        "is_cuda": property(lambda self: self.device.type == "cpu"),
        "pin_memory": lambda self, device=None: self,
        "is_pinned": lambda self, device=None: False,
        "record_stream": lambda self, stream: None,
    }
    for name, override in overrides.items():
        setattr(torch.Tensor, name, override)
    torch.serialization.register_package(
        1, lambda storage: None, lambda storage, location: storage if location.startswith("cuda") else None
    )


def _resolve_device(factory: Any) -> Any:
    @functools.wraps(factory)
    def resolved(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = cpu_for_cuda(kwargs["device"])
        kwargs.pop("pin_memory", None)  # only the CUDA driver can pin memory
        return factory(*args, **kwargs)

    return resolved


@functools.wraps(_native_to)
def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args:  # a device, a dtype or another tensor: only a device is resolved
        args = (cpu_for_cuda(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = cpu_for_cuda(kwargs["device"])
    return _native_to(self, *args, **kwargs)


@functools.wraps(_native_type)
def _type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        name = _native_type(self).removeprefix("torch.").removeprefix("cuda.")  # a mode of torch's calls this wrapper
        return f"torch.cuda.{name}" if self.is_cuda else f"torch.{name}"
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return _native_type(self, dtype, *args, **kwargs)
