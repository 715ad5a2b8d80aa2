"""LayerNorm and RMSNorm. Source: TransformerEngine's normalization.cpp.

With `zero_centered_gamma`, 1 is added to each weight. Statistics are fp32, one for each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .enums import torch_dtype
from .kernel import quantized, require, require_contiguous, require_dtype, rows, store


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _check_forward(kernel: str, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
    """There are kernels for input, weight and output of one dtype, and from fp32 into 16 bits."""
    require_dtype(kernel, (input.dtype,), weight=weight, bias=bias)
    require(
        input.dtype in (dtype, torch.float32),
        kernel,
        f"there is no kernel from {input.dtype} into an output of {dtype}",
    )
    require_contiguous(kernel, input=input, weight=weight, bias=bias)


def _check_backward(kernel: str, dz: Tensor, x: Tensor, gamma: Tensor, add: Tensor | None = None) -> None:
    require_dtype(kernel, (gamma.dtype,), dz=dz, add=add)
    require_dtype(kernel, (gamma.dtype, torch.float32), x=x)


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return [output, mean, 1 / standard deviation]."""
    _check_forward("layernorm_fwd", input, weight, bias, torch_dtype(otype))
    x = rows(input).float()
    mean = x.mean(-1)
    rsigma = torch.rsqrt(x.var(-1, unbiased=False) + eps)
    value = (x - mean[:, None]) * rsigma[:, None] * _gamma(weight, zero_centered_gamma)
    value = value if bias is None else value + bias.float()
    return [quantized(store(value.view(input.shape), ln_out, torch_dtype(otype)), quantizer), mean, rsigma]


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return the gradients of input, weight and bias."""
    _check_backward("layernorm_bwd", dz, x, gamma)
    g = rows(dz).float()
    normalized = (rows(x).float() - mu[:, None]) * rsigma[:, None]
    dn = g * _gamma(gamma, zero_centered_gamma)
    dx = dn - dn.mean(-1, keepdim=True) - normalized * (dn * normalized).mean(-1, keepdim=True)
    dx = (dx * rsigma[:, None]).view(x.shape).to(x.dtype)
    return [dx, (g * normalized).sum(0).to(gamma.dtype), g.sum(0).to(gamma.dtype)]


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return [output, None, 1 / root of the mean square]."""
    _check_forward("rmsnorm_fwd", input, weight, None, torch_dtype(otype))
    x = rows(input).float()
    rsigma = torch.rsqrt(x.square().mean(-1) + eps)
    value = x * rsigma[:, None] * _gamma(weight, zero_centered_gamma)
    return [quantized(store(value.view(input.shape), ln_out, torch_dtype(otype)), quantizer), None, rsigma]


def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
    add: Tensor | None = None,
) -> list[Tensor]:
    """Return the gradients of input (with `add`, the sum of both) and weight."""
    _check_backward("rmsnorm_bwd", dz, x, gamma, add)
    g = rows(dz).float()
    normalized = rows(x).float() * rsigma[:, None]
    dn = g * _gamma(gamma, zero_centered_gamma)
    dx = (dn - normalized * (dn * normalized).mean(-1, keepdim=True)) * rsigma[:, None]
    dx = dx.view(x.shape) if add is None else dx.view(x.shape) + add.float()
    return [dx.to(x.dtype), (g * normalized).sum(0).to(gamma.dtype)]


def rmsnorm_bwd_add(
    dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    return rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma, add)


KERNELS = (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, rmsnorm_bwd_add)
