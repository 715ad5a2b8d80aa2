"""Matrix products. Source: TransformerEngine's gemm.cpp; its gemm is column-major, so it returns op(B) @ op(A)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .activations import tanh_gelu
from .enums import torch_dtype
from .kernel import gradients, quantized, refusal, rows, store, with_bias_gradient


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    return quantized(tensor, quantizer)


def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    return with_bias_gradient(input, quantizer)


def _product(A: Tensor, transA: bool, B: Tensor, transB: bool) -> Tensor:
    a, b = rows(A).float(), rows(B).float()
    return (b.t() if transB else b) @ (a.t() if transA else a)


def generic_gemm(
    A: Tensor,
    transA: bool,
    B: Tensor,
    transB: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Return [product, gradient of the bias, input of gelu, extra_output].

    With `grad`, bias and gelu are those of a backward. The product is rounded once: after bias, gelu and accumulation.
    """
    if comm_overlap is not None:
        refusal("CommOverlap")()
    dtype = A.dtype if output_dtype is None else torch_dtype(output_dtype)
    value = _product(A, transA, B, transB)
    value = value.reshape(value.shape if transB else (*B.shape[:-1], value.shape[-1]))
    value = value if alpha == 1.0 else value * alpha
    bias_grad = pre_gelu = None
    if bias is not None and grad:
        # The sum is over the rows of B, whose columns are those of the bias. With gelu it is over the output's rows.
        bias_grad = None if gelu else rows(B).float().sum(0)
    elif bias is not None:
        value = value + bias.float()
    if gelu and grad:
        assert gelu_in is not None
        (value,) = gradients(tanh_gelu, [gelu_in.float().reshape(value.shape)], value)
        bias_grad = rows(value).sum(0) if bias is not None else None
    elif gelu:
        pre_gelu = value.to(dtype)
        value = tanh_gelu(value)
    if accumulate:
        assert D is not None
        value = value + D.float() * (1.0 if beta is None else beta)
    out = quantized(store(value, D, dtype), quantizer)
    return [out, None if bias_grad is None else bias_grad.to(dtype), pre_gelu, extra_output]


def te_general_grouped_gemm(
    A: list[Tensor],
    transA: bool,
    B: list[Tensor],
    transB: bool,
    D: list[Tensor] | None,
    D_type: Any,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    """Return one product for each expert. With `single_output` they are one after the other in D[0]."""
    values = [_product(a, transA, b, transB) for a, b in zip(A, B, strict=True)]
    outs: Sequence[Tensor]
    if single_output:
        assert D is not None
        flat = D[0].view(-1)
        ends = torch.tensor([value.numel() for value in values]).cumsum(0).tolist()
        outs = [flat[end - v.numel() : end].view(v.shape) for end, v in zip(ends, values, strict=True)]
    else:
        outs = [torch.empty(v.shape, dtype=torch_dtype(D_type)) for v in values] if D is None else D
    for i, (value, out) in enumerate(zip(values, outs, strict=True)):
        if bias[i].numel() and grad:
            bias[i].copy_(rows(B[i]).float().sum(0))
        elif bias[i].numel():
            value = value + bias[i].float()
        if pre_gelu_out[i].numel():
            refusal("te_general_grouped_gemm with gelu")()
        out.copy_((value + out.float() if accumulate else value).reshape(out.shape))
    return bias if D is not None else list(outs)


KERNELS = (quantize, bgrad_quantize, generic_gemm, te_general_grouped_gemm)
