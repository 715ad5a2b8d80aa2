"""Activations: forward, backward, and backward with the gradient of a bias. Source: TransformerEngine's activation.cpp.

The input of a gated activation has twice the width of its output: the first half is the gate's input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .kernel import gradients, quantized, with_bias_gradient

Activation = Callable[[Tensor], Tensor]


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


PLAIN: dict[str, Activation] = {
    "gelu": tanh_gelu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": F.silu,
}


def _gated(gate: Activation) -> Activation:
    def gated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return gate(first) * second

    return gated


GATED: dict[str, Activation] = {
    "glu": _gated(torch.sigmoid),
    "geglu": _gated(PLAIN["gelu"]),
    "qgeglu": _gated(PLAIN["qgelu"]),
    "reglu": _gated(PLAIN["relu"]),
    "sreglu": _gated(PLAIN["srelu"]),
    "swiglu": _gated(PLAIN["silu"]),
}


def clamped(limit: float, alpha: float, offset: float) -> Activation:
    """Make gpt-oss's swiglu: both halves are clamped, and `offset` is added to the second."""

    def activation(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        first, second = first.clamp(max=limit), second.clamp(-limit, limit)
        return first * torch.sigmoid(alpha * first) * (second + offset)

    return activation


def _forward(activation: Activation, input: Tensor, quantizer: Any) -> Any:
    return quantized(activation(input.detach().float()).to(input.dtype), quantizer)


def _backward(activation: Activation, grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
    return quantized(gradients(activation, [fwd_input], grad)[0], quantizer)


def _make(name: str, activation: Activation) -> list[Callable[..., Any]]:
    def forward(input: Tensor, quantizer: Any) -> Any:
        return _forward(activation, input, quantizer)

    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        return _backward(activation, grad, fwd_input, quantizer)

    forward.__name__, backward.__name__ = name, f"d{name}"
    return [forward, backward]


def _make_with_bias(name: str, activation: Activation) -> Callable[..., Any]:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        return with_bias_gradient(gradients(activation, [fwd_input], grad)[0], quantizer)

    backward.__name__ = f"dbias_d{name}"
    return backward


def clamped_swiglu(
    input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Any:
    return _forward(clamped(limit, alpha, glu_linear_offset), input, quantizer)


def clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    return _backward(clamped(limit, alpha, glu_linear_offset), grad, fwd_input, quantizer)


KERNELS = (
    *(kernel for name, activation in {**PLAIN, **GATED}.items() for kernel in _make(name, activation)),
    *(_make_with_bias(name, activation) for name, activation in PLAIN.items()),
    clamped_swiglu,
    clamped_dswiglu,
)
