"""The arguments of kernels over lists of tensors. Source: multi_tensor_apply.cuh and the checks of its callers.

A launch gets the address and the number of elements of each tensor of the first list, the addresses of the others, and
one dtype for each list. Whatever differs from that is read wrongly, or out of bounds, without an error; here it is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

Lists = list[list[Tensor]]
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_lists(
    kernel: str, lists: Lists, roles: str, dtypes: dict[str, tuple[torch.dtype, ...]] | None = None
) -> None:
    """Raise RuntimeError for lists that the kernel refuses or misreads.

    Args:
        roles: the names of the lists, in their order.
        dtypes: of the tensors of a list; of each list that is not named, one of FLOATS.
    """
    names = roles.split()
    if len(lists) != len(names):
        raise RuntimeError(f"{kernel}: expected {len(names)} tensor lists ({', '.join(names)}), but found {len(lists)}")
    if not lists[0]:
        raise RuntimeError(
            f"{kernel}: the lists are empty, and the kernel reads their first tensor: leave the call out"
        )
    for name, tensors in zip(names, lists, strict=True):
        if len(tensors) != len(lists[0]):
            raise RuntimeError(f"{kernel}: {name} has {len(tensors)} tensors, {names[0]} {len(lists[0])}")
        allowed = (dtypes or {}).get(name, FLOATS)
        for i, (tensor, first) in enumerate(zip(tensors, lists[0], strict=True)):
            _check(f"{kernel}: tensor {i} of {name}", tensor, tensors[0].dtype, first, allowed)


def _check(
    called: str, tensor: Tensor, dtype: torch.dtype, first_tensor: Tensor, allowed: tuple[torch.dtype, ...]
) -> None:
    if tensor.dtype not in allowed:
        raise RuntimeError(f"{called} is {tensor.dtype}: expected {' or '.join(map(str, allowed))}")
    if tensor.dtype != dtype:
        raise RuntimeError(
            f"{called} is {tensor.dtype}, but the kernel reads the whole list as {dtype}, the dtype of its first "
            f"tensor: call it once for each dtype"
        )
    if not tensor.numel():
        raise RuntimeError(
            f"{called} has no elements: with one at the end the kernel is not launched for the tensors before it; "
            f"leave it out"
        )
    if tensor.numel() != first_tensor.numel():
        raise RuntimeError(
            f"{called} has {tensor.numel()} elements, but the kernel takes as many as the first list's tensor has: "
            f"{first_tensor.numel()}"
        )
    if not _lie_alike(tensor, first_tensor):
        raise RuntimeError(
            f"{called} has strides {tensor.stride()}, but the kernel reads memory in the order in which it lies: pass "
            f"tensors without gaps, and those of one place in all lists in one layout"
        )


def _lie_alike(tensor: Tensor, other: Tensor) -> bool:
    """True if neither has gaps, and the elements of one place in memory are those of one place in the tensors."""
    if tensor.is_contiguous() and other.is_contiguous():
        return True
    is_same_layout = tensor.shape == other.shape and tensor.stride() == other.stride()
    return is_same_layout and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def check_scalar(kernel: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise RuntimeError unless a number that the kernel reads through a pointer has the dtype of that pointer."""
    if tensor.dtype != dtype or tensor.numel() != 1:
        raise RuntimeError(
            f"{kernel}: {name} is {tensor.numel()} x {tensor.dtype}; the kernel reads one number as {dtype}"
        )
