"""Layer 1: the factory kernels of torch's CUDA dispatch key make CPU tensors.

Every factory ends in one of these two kernels, however it is called: from Python, C++, or a name that was imported
before. So this reaches calls that replaced Python functions do not see. It costs nothing on other devices.
"""

from __future__ import annotations

from typing import Any

import torch

CPU = torch.device("cpu")
_registrations: list[torch.library.Library] = []  # a Library that is garbage-collected unregisters its kernels


def cpu_for_cuda(device: Any) -> Any:
    """Return the CPU for any spelling of a CUDA device ('cuda:1', torch.device('cuda'), 1), else `device` itself."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    return CPU if isinstance(device, int) and not isinstance(device, bool) else device


def install() -> None:
    """Register the kernels, and prevent factories from initialising CUDA."""
    torch.cuda._lazy_init = lambda: None
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _on_cpu(torch.ops.aten.empty.memory_format), "CUDA")
    library.impl("empty_strided", _on_cpu(torch.ops.aten.empty_strided.default), "CUDA")
    _registrations.append(library)


def _on_cpu(kernel: Any) -> Any:
    def factory(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> torch.Tensor:
        return kernel(*args, device=CPU, **kwargs)

    return factory
