"""Multiply bf16 matrices in fp32 where the CPU has no instructions for bf16.

There torch multiplies them with a loop of scalars: a 256 x 256 product takes 40 times as long as in fp32 (torch 2.15, a
CPU with AVX2). The products here have fp32 operands and sums and are rounded once, as on a GPU's tensor cores.
"""

from __future__ import annotations

from typing import Any

import torch

SMALLEST = 32**3  # multiplications; below, two conversions cost more than the scalars do
_registrations: list[torch.library.Library] = []  # a Library that is garbage-collected unregisters its kernels


def install() -> None:
    """Register the kernels of matrix products, into which torch decomposes matmul, linear and einsum."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    library = torch.library.Library("aten", "IMPL")
    for name in ("mm", "bmm", "addmm", "baddbmm"):
        library.impl(name, _in_fp32(name), "CPU", allow_override=True)
    _registrations.append(library)


def _in_fp32(name: str) -> Any:
    product, native = getattr(torch, name), getattr(torch.ops.aten, name).out  # the latter keeps torch's own kernel

    def multiply(*tensors: torch.Tensor, **scales: Any) -> torch.Tensor:
        left, right = tensors[-2:]
        if left.dtype is torch.bfloat16 and left.numel() * right.shape[-1] >= SMALLEST:
            return product(*(tensor.float() for tensor in tensors), **scales).bfloat16()
        return native(*tensors, **scales, out=left.new_empty((*left.shape[:-1], right.shape[-1])))

    return multiply
