"""TransformerEngine's Triton kernels for MoE: permutation by a mask map, and sorting of chunks.

Source: transformer_engine/common/triton/permutation.py. Triton's interpreter can run them as well, one program for each
token, but a step of a small model takes minutes. tests/rehearsal/transformer_engine compares both.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def install(module: ModuleType) -> None:
    """Replace the functions of transformer_engine.pytorch.triton.permutation, with the same parameters."""
    for function in (
        make_row_id_map,
        permute_with_mask_map,
        unpermute_with_mask_map,
        unpermute_with_mask_map_bwd_with_merging_probs,
        make_chunk_sort_map,
        sort_chunks_by_map,
    ):
        setattr(module, function.__name__, _with_signature(function, getattr(module, function.__name__)))


def _with_signature(function: Any, original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(**signature.bind(*args, **kwargs).arguments)

    return call


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return for each token: its rows in the permuted order (descending), their experts, and their number."""
    mask = routing_map.bool()
    rows = (mask.t().reshape(-1).cumsum(0) - 1).view(num_experts, num_tokens).t()
    rows, experts = rows.masked_fill(~mask, -1).sort(1, descending=True)
    return torch.cat((rows, experts, mask.sum(1, keepdim=True)), 1).int()


def _routes(row_id_map: Tensor, num_experts: int, pad_offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (token, expert, row) for each pair of a token and one of its experts."""
    token, slot = (torch.arange(num_experts) < row_id_map[:, -1:]).nonzero(as_tuple=True)
    expert = row_id_map[token, num_experts + slot].long()
    row = row_id_map[token, slot].long()
    return token, expert, row if pad_offsets is None else row + pad_offsets[expert]


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    num_experts: int,
    num_out_tokens: int,
    scale: Tensor | None = None,
    pad_offsets: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (tokens, scales, probabilities), in the order of the experts."""
    token, expert, row = _routes(row_id_map, num_experts, pad_offsets)
    output = inp.new_zeros(num_out_tokens, inp.shape[1])
    output[row] = inp[token]
    permuted_scale = permuted_probs = None
    if scale is not None:
        permuted_scale = scale.new_zeros(num_out_tokens, scale.shape[1])
        permuted_scale[row] = scale[token]
    if probs is not None:
        permuted_probs = probs.new_zeros(num_out_tokens)
        permuted_probs[row] = probs[token, expert]
        output[row] *= (probs[token, expert] != 0)[:, None]  # a padding slot
    return output, permuted_scale, permuted_probs


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    num_tokens: int,
    num_experts: int,
    pad_offsets: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return (the sum of each token's rows, probabilities [tokens, experts])."""
    token, expert, row = _routes(row_id_map, num_experts, pad_offsets)
    values = inp[row].float()
    if merging_probs is not None:
        values = values * merging_probs[token, expert].float()[:, None]
    output = torch.zeros(num_tokens, inp.shape[1]).index_add_(0, token, values).to(inp.dtype)
    probs = None
    if permuted_probs is not None:
        probs = permuted_probs.new_zeros(num_tokens, num_experts)
        probs[token, expert] = permuted_probs[row]
    return output, probs


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    num_experts: int,
    num_out_tokens: int,
    pad_offsets: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and probabilities."""
    token, expert, row = _routes(row_id_map, num_experts, pad_offsets)
    grads = fwd_output_grad[token].float()
    act_grad = fwd_output_grad.new_zeros(num_out_tokens, fwd_output_grad.shape[1])
    act_grad[row] = (grads * merging_probs[token, expert].float()[:, None]).to(act_grad.dtype)
    probs_grad = torch.zeros_like(merging_probs)
    probs_grad[token, expert] = (grads * fwd_input[row].float()).sum(1).to(probs_grad.dtype)
    return act_grad, probs_grad


def make_chunk_sort_map(split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, **_: Any) -> Tensor:
    """Return the new place of each row when the chunks are sorted by `sorted_indices`."""
    sizes = split_sizes.tolist()
    chunks = torch.arange(sum(sizes)).split(sizes)
    source = torch.cat([chunks[i] for i in sorted_indices.tolist()])
    row_id_map = torch.arange(num_tokens, dtype=torch.int32)  # rows after the last chunk stay where they are
    row_id_map[source] = torch.arange(len(source), dtype=torch.int32)
    return row_id_map


def sort_chunks_by_map(
    inp: Tensor, row_id_map: Tensor, probs: Tensor | None, is_forward: bool, **_: Any
) -> tuple[Tensor, Tensor | None]:
    rows = row_id_map.long()
    order = rows.argsort() if is_forward else rows
    return inp[order], None if probs is None else probs[order]
