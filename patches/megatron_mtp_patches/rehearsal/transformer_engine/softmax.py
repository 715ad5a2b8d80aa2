"""Scaled, masked softmax, and dropout. Source: TransformerEngine's softmax.cpp and dropout.cpp.

A row that is masked completely is 0. The dropout mask has one byte for each element, and a GPU draws other numbers:
losses with dropout differ from those of a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .kernel import store


def _softmax(x: Tensor, masked: Tensor | None, scale: float) -> Tensor:
    value = x.float() * scale
    if masked is None:
        return torch.softmax(value, -1).to(x.dtype)
    value = torch.softmax(value.masked_fill(masked, -math.inf), -1)
    return value.masked_fill(masked, 0.0).to(x.dtype)


def _above_diagonal(x: Tensor) -> Tensor:
    queries, keys = x.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


def scaled_softmax_forward(input: Tensor, scale: float) -> Tensor:
    return _softmax(input, None, scale)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: float) -> Tensor:
    return _softmax(input, mask.bool(), scale)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
    return _softmax(input, _above_diagonal(input), scale)


def scaled_aligned_causal_masked_softmax_forward(input: Tensor, scale: float) -> Tensor:
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
