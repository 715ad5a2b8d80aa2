"""Packed sequences (thd): conversions, and what ring attention does with one rank's part of each sequence.

Source: TransformerEngine's attention.cpp and context_parallel.cu. `cu_seqlens` [sequences + 1] holds the offsets of the
rank; each of its sequences has two chunks of the same length. Statistics of the softmax are "packed": [heads, tokens]
in fp32, as cuDNN 9.6 and later return them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel import refusal, require, require_contiguous, require_dtype


def _spans(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    ends = cu_seqlens.tolist()
    return list(zip(ends, ends[1:], strict=False))


def convert_thd_to_bshd(tensor: Tensor, cu_seqlens: Tensor, b: int, max_seq_len: int) -> Tensor:
    """Convert [tokens, ...] to [b, max_seq_len, ...], padded with zeros."""
    out = tensor.new_zeros(b, max_seq_len, *tensor.shape[1:])
    for i, (begin, end) in enumerate(_spans(cu_seqlens)[:b]):
        out[i, : end - begin] = tensor[begin:end]
    return out


def convert_bshd_to_thd(tensor: Tensor, cu_seqlens: Tensor, t: int) -> Tensor:
    """Convert [b, max_seq_len, ...] to [t, ...]."""
    out = tensor.new_zeros(t, *tensor.shape[2:])
    for i, (begin, end) in enumerate(_spans(cu_seqlens)):
        out[begin:end] = tensor[i, : end - begin]
    return out


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Return the tokens that this rank gets under context parallelism: 2 of each sequence's 2 * world_size chunks."""
    _check_packed("thd_get_partitioned_indices", cu_seqlens)
    parts = []
    for begin, end in _spans(cu_seqlens):
        chunks = torch.arange(begin, end, dtype=torch.int32).view(2 * world_size, -1)
        parts += [chunks[rank], chunks[2 * world_size - rank - 1]]
    return torch.cat(parts)


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    swapped = tensor.transpose(0, 1)
    return swapped.contiguous() if out is None else out.copy_(swapped)


def _tokens_of_half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Return the rank's tokens that are in the first (0) or the second (1) chunk of their sequence."""
    parts = [torch.arange(begin, end).chunk(2)[half] for begin, end in _spans(cu_seqlens) if end > begin]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)


def _check_packed(kernel: str, cu_seqlens: Tensor, tensor: Tensor | None = None) -> None:
    """A thread moves 16 bytes of the heads of a token at a time."""
    require_dtype(kernel, (torch.int32,), cu_seqlens=cu_seqlens)
    require(cu_seqlens.dim() == 1 and len(cu_seqlens) >= 2, kernel, f"cu_seqlens are {list(cu_seqlens.shape)}")
    if tensor is not None:
        width = tensor.shape[-2] * tensor.shape[-1]
        is_aligned = width * tensor.element_size() % 16 == 0
        require(
            is_aligned, kernel, f"the heads of a token are {width} x {tensor.dtype}, expected a multiple of 16 bytes"
        )
        require_contiguous(kernel, tensor=tensor)


def _check_statistics(kernel: str, cu_seqlens: Tensor, lse_packed: bool, **statistics: Tensor) -> None:
    if not lse_packed:
        refusal("thd_* with statistics that are not packed")()
    _check_packed(kernel, cu_seqlens)
    require_dtype(kernel, (torch.float32,), **statistics)
    require_contiguous(kernel, **statistics)


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Return one chunk of each sequence of [tokens, heads, width], or of two such tensors stacked."""
    _check_packed("thd_read_half_tensor", cu_seqlens, tensor)
    return tensor.index_select(tensor.dim() - 3, _tokens_of_half(cu_seqlens, half_idx))


def thd_second_half_lse_correction(lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    """Add the statistics of a step that saw only second chunks to those of all tokens, in place."""
    kernel = "thd_second_half_lse_correction"
    _check_statistics(kernel, cu_seqlens, lse_packed, lse=lse, lse_per_step=lse_per_step)
    at = _tokens_of_half(cu_seqlens, 1)
    lse[:, at] = torch.logaddexp(lse[:, at], lse_per_step[:, : len(at)])


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Tensor:
    """Return [heads, second_half_lse_seqlen]: the statistics of the second chunks."""
    _check_statistics("thd_read_second_half_lse", cu_seqlens, lse_packed, lse=lse)
    at = _tokens_of_half(cu_seqlens, 1)
    second_half = lse.new_zeros(lse.shape[0], second_half_lse_seqlen)
    second_half[:, : len(at)] = lse[:, at]
    return second_half


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Weigh a step's output [tokens, heads, width] by its share of the softmax, and add it to `out` in place."""
    _check_statistics("thd_out_correction", cu_seqlens, lse_packed, lse=lse, lse_per_step=lse_per_step)
    require_dtype("thd_out_correction", (out.dtype,), out_per_step=out_per_step)
    require_contiguous("thd_out_correction", out=out, out_per_step=out_per_step)
    at = _tokens_of_half(cu_seqlens, 1) if only_second_half else torch.arange(int(cu_seqlens[-1]))
    share = torch.exp(lse_per_step[:, : len(at)] - lse[:, at]).t()[..., None]
    step = out_per_step.view(-1, *out.shape[-2:])[: len(at)].float()
    out[at] += torch.where(step == 0, 0.0, step * share).to(out.dtype)


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Copy or add a step's gradient to each half of `grad` in place; the action is "copy", "add" or "none".

    If the action of one half is "none", the step has only tokens of the other half.
    """
    _check_packed("thd_grad_correction", cu_seqlens, grad)
    require_dtype("thd_grad_correction", (grad.dtype,), grad_per_step=grad_per_step)
    require_contiguous("thd_grad_correction", grad_per_step=grad_per_step)
    along = grad.dim() - 3
    halves = [_tokens_of_half(cu_seqlens, half) for half in (0, 1)]
    has_both_halves = "none" not in (first_half, second_half)
    for at, action in zip(halves, (first_half, second_half), strict=True):
        if action == "none":
            continue
        step = grad_per_step.index_select(along, at) if has_both_halves else grad_per_step.narrow(along, 0, len(at))
        if action == "add":
            step = grad.index_select(along, at) + step
        grad.index_copy_(along, at, step)


KERNELS = (
    convert_thd_to_bshd,
    convert_bshd_to_thd,
    thd_get_partitioned_indices,
    swap_first_dims,
    thd_read_half_tensor,
    thd_second_half_lse_correction,
    thd_read_second_half_lse,
    thd_out_correction,
    thd_grad_correction,
)
