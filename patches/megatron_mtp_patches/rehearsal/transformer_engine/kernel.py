"""Parts of all kernels: they compute in fp32 and round once; what has no stand-in raises an error that names it.

What a kernel refuses, or reads wrongly without an error, the stand-ins refuse by a RuntimeError (`require`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def refusal(name: str) -> Callable[..., Any]:
    """Make a function that raises a NotImplementedError with its name when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{name}: a rehearsal on the CPU cannot do this.")

    refuse.__name__ = name
    return refuse


def quantized(tensor: Tensor, quantizer: Any) -> Tensor:
    """Return the output of a kernel that may quantize: the tensor itself if no quantizer is given.

    Raises:
        NotImplementedError: a quantizer is given (fp8, fp4).
    """
    if quantizer is not None:
        raise NotImplementedError(f"{type(quantizer).__name__}: a rehearsal on the CPU quantizes nothing.")
    return tensor


def require(holds: bool, kernel: str, problem: str) -> None:
    """Raise RuntimeError with `problem`, which the kernel itself refuses or computes wrong numbers from in silence."""
    if not holds:
        raise RuntimeError(f"{kernel}: {problem}")


def require_contiguous(kernel: str, **tensors: Tensor | None) -> None:
    """A kernel that gets the address and the shape of a tensor reads what lies there, whatever its strides are."""
    for name, tensor in tensors.items():
        require(
            tensor is None or tensor.is_contiguous(),
            kernel,
            f"{name} has strides {tensor is not None and tensor.stride()}, but the kernel reads memory in the order in "
            f"which it lies: pass a contiguous tensor",
        )


def require_dtype(kernel: str, dtypes: tuple[torch.dtype, ...], **tensors: Tensor | None) -> None:
    """A kernel reads a tensor as the dtype that it expects; some check it before."""
    for name, tensor in tensors.items():
        if tensor is not None:
            expected = " or ".join(map(str, dtypes))
            require(tensor.dtype in dtypes, kernel, f"{name} is {tensor.dtype}, expected {expected}")


def rows(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix: all dimensions but the last become rows."""
    return tensor.reshape(-1, tensor.shape[-1])


def with_bias_gradient(grad: Tensor, quantizer: Any) -> list[Tensor]:
    """Return the gradient of a bias, which is the sum over all rows, and the gradient itself."""
    return [rows(grad).float().sum(0).to(grad.dtype), quantized(grad, quantizer)]


def store(value: Tensor, out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Round `value` to `dtype`, or write it to `out`."""
    return value.to(dtype) if out is None else out.copy_(value)


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of `function` at `inputs`, computed in fp32 and rounded to the dtype of each input."""
    with torch.enable_grad():
        leaves = [one.detach().float().requires_grad_() for one in inputs]
        grads = torch.autograd.grad(function(*leaves), leaves, grad.float())
    return tuple(value.to(one.dtype) for value, one in zip(grads, inputs, strict=True))
