"""Permutation of tokens by an index map. Source: TransformerEngine's permutation.cpp.

`row_id_map` holds, for each slot of each token (slots first), the row to which it went, or -1. Permutation by a mask
map is a Triton kernel: see permutation.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernel import require, require_contiguous, require_dtype


def _check(kernel: str, rows: Tensor, prob: Tensor | None = None, top_k: int = 1) -> None:
    """A thread reads 16 bytes of a row at a time."""
    require_contiguous(kernel, input=rows)
    require(
        rows.shape[1] * rows.element_size() % 16 == 0,
        kernel,
        f"rows of {rows.shape[1]} x {rows.dtype} are not a multiple of 16 bytes",
    )
    if prob is not None and prob.numel():
        require_dtype(kernel, (torch.float32,), prob=prob)
        require_contiguous(kernel, prob=prob)
        require(top_k <= 128, kernel, f"topK is {top_k}, and cannot exceed 128")


def moe_permute_fwd(
    input: Tensor, dtype: Any, indices: Tensor, num_out_tokens: int, workspace: list[Tensor], max_expanded: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    _check("moe_permute_fwd", input)
    require_dtype("moe_permute_fwd", (torch.int32,), indices=indices)
    require_contiguous("moe_permute_fwd", indices=indices)
    tokens, top_k = indices.shape
    order = indices.reshape(-1).argsort(stable=True)
    count = num_out_tokens if num_out_tokens > 0 else tokens * top_k
    place = torch.arange(tokens * top_k, dtype=torch.int32)
    row_id_map = torch.empty(tokens * top_k, dtype=torch.int32)
    row_id_map[(order % top_k) * tokens + order // top_k] = place.where(place < count, -1)
    return input[order[:count] // top_k], row_id_map, workspace


def moe_unpermute_fwd(
    input: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int
) -> Tensor:
    _check("moe_unpermute_fwd", input, prob, topK)
    row_ids = row_id_map.view(topK, num_tokens).t().long()
    value = input.float()[row_ids.clamp(min=0)] * (row_ids >= 0)[..., None]
    return (value * prob.float()[..., None] if prob.numel() else value).sum(1).to(input.dtype)


def moe_permute_bwd(input: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor, num_tokens: int, topK: int) -> Tensor:
    return moe_unpermute_fwd(input, dtype, row_id_map, prob, num_tokens, topK)


def moe_unpermute_bwd(
    input_bwd: Tensor, input_fwd: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, top_k = prob.shape if prob.numel() else (row_id_map.shape[0], 1)
    _check("moe_unpermute_bwd", input_bwd, prob, top_k)
    require_dtype("moe_unpermute_bwd", (input_bwd.dtype,), input_fwd=input_fwd)
    row_ids = row_id_map.view(top_k, tokens).t().long()
    token, slot = (row_ids >= 0).nonzero(as_tuple=True)
    grads = input_bwd.float()[token]
    act_grad = torch.zeros(input_fwd.shape)
    act_grad[row_ids[token, slot]] = grads * prob.float()[token, slot, None] if prob.numel() else grads
    prob_grad = torch.zeros(tokens, top_k)
    prob_grad[token, slot] = (grads * input_fwd.float()[row_ids[token, slot]]).sum(-1)
    return act_grad.to(input_bwd.dtype), prob_grad


KERNELS = (moe_permute_fwd, moe_permute_bwd, moe_unpermute_fwd, moe_unpermute_bwd)
