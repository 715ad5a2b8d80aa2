"""Scaled, masked softmax, and dropout. Source: TransformerEngine's softmax.cpp and dropout.cpp.

A row that is masked completely is 0. The dropout mask has one byte for each element, and a GPU draws other numbers:
losses with dropout differ from those of a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .kernel import require, require_contiguous, require_dtype, store

LONGEST = 16384  # keys of a query


def _softmax(x: Tensor, masked: Tensor | None, scale: float) -> Tensor:
    value = x.float() * scale
    if masked is None:
        return torch.softmax(value, -1).to(x.dtype)
    value = torch.softmax(value.masked_fill(masked, -math.inf), -1)
    return value.masked_fill(masked, 0.0).to(x.dtype)


def _check(kernel: str, x: Tensor, fewest_queries: int) -> None:
    require_dtype(kernel, (torch.float16, torch.bfloat16), input=x)
    require(
        x.dim() == 4 and x.shape[-1] <= LONGEST and x.shape[-1] % 8 == 0 and x.shape[-2] >= fewest_queries,
        kernel,
        f"the input is {list(x.shape)}, expected [batch, heads, queries, keys] with at least {fewest_queries} queries "
        f"and a multiple of 8 keys, up to {LONGEST}",
    )


def _above_diagonal(x: Tensor) -> Tensor:
    queries, keys = x.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


def scaled_softmax_forward(input: Tensor, scale: float) -> Tensor:
    _check("scaled_softmax_forward", input, 2)
    require_contiguous("scaled_softmax_forward", input=input)
    return _softmax(input, None, scale)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float) -> Tensor:
    _check("scaled_masked_softmax_forward", input, 2)
    shapes = [[batch, 1, *input.shape[2:]] for batch in (1, input.shape[0])]
    expected = f"expected {shapes[0]} or {shapes[1]}"
    require(list(mask.shape) in shapes, "scaled_masked_softmax_forward", f"the mask is {list(mask.shape)}, {expected}")
    return _softmax(input, mask.bool(), scale)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
    kernel = "scaled_upper_triang_masked_softmax_forward"
    require_dtype(kernel, (torch.float16, torch.bfloat16), input=input)
    require_contiguous(kernel, input=input)
    is_square = input.dim() == 3 and input.shape[1] == input.shape[2] <= LONGEST
    require(is_square, kernel, f"the input is {list(input.shape)}, expected [batch x heads, s, s], s <= {LONGEST}")
    return _softmax(input, _above_diagonal(input), scale)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
    _check("scaled_aligned_causal_masked_softmax_forward", input, 1)
    require_contiguous("scaled_aligned_causal_masked_softmax_forward", input=input)
    return _softmax(input, _above_diagonal(input), scale)


def _backward_named(name: str) -> Any:
    def backward(grad: Tensor, result: Tensor, scale: float) -> Tensor:
        g, y = grad.float(), result.float()
        return (scale * y * (g - (g * y).sum(-1, keepdim=True))).to(grad.dtype)

    backward.__name__ = name
    return backward


def dropout_fwd(input: Tensor, dropout_probability: float, out: Tensor | None = None) -> list[Tensor]:
    mask = torch.rand(input.shape) >= dropout_probability
    return [store(input.float() * mask / (1 - dropout_probability), out, input.dtype), mask.to(torch.uint8)]


def dropout_bwd(grad_output: Tensor, mask: Tensor, dropout_probability: float, grad_input: Any = None) -> Tensor:
    return store(grad_output.float() * mask / (1 - dropout_probability), grad_input, grad_output.dtype)


KERNELS = (
    scaled_softmax_forward,
    scaled_masked_softmax_forward,
    scaled_upper_triang_masked_softmax_forward,
    scaled_aligned_causal_masked_softmax_forward,
    *(
        _backward_named(f"scaled_{kind}softmax_backward")
        for kind in ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_")
    ),
    dropout_fwd,
    dropout_bwd,
)
