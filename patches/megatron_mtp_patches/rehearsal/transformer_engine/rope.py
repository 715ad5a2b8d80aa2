"""Rotary position embedding of one tensor, and of queries, keys and values together. Source: apply_rope.cpp.

With context parallelism a rank has two chunks of each sequence: one counted from the front and one from the back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .enums import NVTE_QKV_Format
from .kernel import gradients, require, require_contiguous, require_dtype


def _position(length: int, start: int, cp_size: int, cp_rank: int) -> Tensor:
    """Return the position of each of a rank's tokens in its sequence."""
    position = torch.arange(length)
    if cp_size > 1:
        half = length // 2
        second = length * cp_size - (cp_rank + 1) * half - half
        position = position + torch.where(position < half, cp_rank * half, second)
    return position + start


def _rotate(x: Tensor, angle: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first columns of x by `angle`, which ends in (1 head, width); columns beyond that width stay."""
    width = angle.shape[-1]
    first, rest = x[..., :width], x[..., width:]
    if interleaved:
        turned = torch.stack((-first[..., 1::2], first[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-first[..., width // 2 :], first[..., : width // 2]), -1)
    return torch.cat((first * angle.cos() + turned * angle.sin(), rest), -1)


def _rope(
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Callable[[Tensor], Tensor]:
    require_dtype("fused_rope", (torch.float32,), freqs=freqs)
    require_contiguous("fused_rope", freqs=freqs)
    is_by_position = freqs.dim() == 4 and freqs.shape[1:3] == (1, 1)
    require(is_by_position, "fused_rope", f"freqs are {list(freqs.shape)}, expected [positions, 1, 1, width]")
    require_dtype("fused_rope", (torch.int32,), cu_seqlens=cu_seqlens)
    angles = freqs.flatten(0, 2)

    def rope(x: Tensor) -> Tensor:
        width = freqs.shape[-1]
        require(x.shape[-1] >= width, "fused_rope", f"a head has width {x.shape[-1]}, and freqs have {width}")
        starts = None if start_positions is None else start_positions.tolist()
        if qkv_format == NVTE_QKV_Format.NVTE_THD:
            assert cu_seqlens is not None
            if cu_seqlens.dim() != 1:
                raise RuntimeError("cu_seqlens: expected 1D tensor")
            ends = [end // cp_size for end in cu_seqlens.tolist()]
            lengths = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
            at = [_position(n, starts[i] if starts else 0, cp_size, cp_rank) for i, n in enumerate(lengths)]
            return _rotate(x[: ends[-1]], angles[torch.cat(at)][:, None, :], interleaved)
        along, batch = (0, 1) if qkv_format == NVTE_QKV_Format.NVTE_SBHD else (1, 0)
        at = [_position(x.shape[along], start, cp_size, cp_rank) for start in starts or [0]]
        angle = angles[torch.stack(at, batch)]  # without starts, one angle serves the whole batch
        return _rotate(x, angle[:, :, None, :], interleaved)

    return rope


def fused_rope_forward(input: Tensor, freqs: Tensor, *how: Any) -> Tensor:
    return _rope(freqs, *how)(input.float()).to(input.dtype)


def fused_rope_backward(output_grads: Tensor, freqs: Tensor, *how: Any) -> Tensor:
    return gradients(_rope(freqs, *how), [output_grads], output_grads)[0]  # linear, so the input does not matter


def _qkv_rope(
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Any,
    splits: list[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    how = (start_positions, qkv_format, interleaved, None, cp_size, cp_rank)

    def rope(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = qkv.split(splits, -1)
        q = q.reshape(*q.shape[:2], -1, splits[1])
        return _rope(q_freqs, *how)(q), _rope(k_freqs, *how)(k), v

    return rope


def fused_qkv_rope_forward(qkv_input: Tensor, *how: Any) -> tuple[Tensor, ...]:
    require_contiguous("fused_qkv_rope_forward", qkv_input=qkv_input)
    return tuple(one.to(qkv_input.dtype).contiguous() for one in _qkv_rope(*how)(qkv_input.float()))


def fused_qkv_rope_backward(
    q_grad: Tensor, k_grad: Tensor, v_grad: Tensor, q_freqs: Tensor, k_freqs: Tensor, splits: list[int], *how: Any
) -> Tensor:
    rope = _qkv_rope(q_freqs, k_freqs, None, splits, *how)
    with torch.enable_grad():
        qkv = torch.zeros(*k_grad.shape[:3], sum(splits)).requires_grad_()
        (grad,) = torch.autograd.grad(rope(qkv), qkv, [one.float() for one in (q_grad, k_grad, v_grad)])
    return grad.to(q_grad.dtype)


KERNELS = (fused_rope_forward, fused_rope_backward, fused_qkv_rope_forward, fused_qkv_rope_backward)
