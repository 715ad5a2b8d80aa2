"""Matrix products. Source: TransformerEngine's gemm.cpp; its gemm is column-major, so it returns op(B) @ op(A)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .activations import tanh_gelu
from .enums import torch_dtype
from .kernel import (
    gradients,
    quantized,
    refusal,
    require,
    require_contiguous,
    require_dtype,
    rows,
    store,
    with_bias_gradient,
)


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    return quantized(tensor, quantizer)


def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    return with_bias_gradient(input, quantizer)


def _check(kernel: str, A: Tensor, B: Tensor, D: Tensor | None, dtype: torch.dtype) -> None:
    """cuBLASLt has products of two matrices of one dtype, into that dtype or fp32."""
    require_dtype(kernel, (torch.float32, torch.float16, torch.bfloat16), A=A)
    require_dtype(kernel, (A.dtype,), B=B)
    require(dtype in (A.dtype, torch.float32), kernel, f"there is no product of {A.dtype} into {dtype}")
    require_contiguous(kernel, A=A, B=B, D=D)


def _check_output(kernel: str, D: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    actual, expected = (list(D.shape), D.dtype), (list(shape), dtype)
    require(actual == expected, kernel, f"D has shape and dtype {actual}, expected {expected}")


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
    default = D.dtype if D is not None else A.dtype
    dtype = default if output_dtype is None else torch_dtype(output_dtype)
    _check("generic_gemm", A, B, D, dtype)
    require(accumulate or not beta, "generic_gemm", f"beta {beta} has nothing to be applied to without accumulate")
    require(D is not None or not accumulate, "generic_gemm", "accumulate adds to memory that nothing has set: give D")
    if not grad:
        require_dtype("generic_gemm", (dtype,), bias=bias)
    value = _product(A, transA, B, transB)
    value = value.reshape(value.shape if transB else (*B.shape[:-1], value.shape[-1]))
    if D is not None:
        _check_output("generic_gemm", D, value.shape, dtype)
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
    if accumulate and D is not None:
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
    kernel, dtype = "te_general_grouped_gemm", torch_dtype(D_type)
    for place, (a, b) in enumerate(zip(A, B, strict=True)):
        out_of_place = None if D is None else D[0 if single_output else place]
        _check(kernel, a, b, out_of_place, dtype if out_of_place is None else out_of_place.dtype)
    values = [_product(a, transA, b, transB) for a, b in zip(A, B, strict=True)]
    outs: Sequence[Tensor]
    if single_output:
        assert D is not None
        count = sum(value.numel() for value in values)
        require_dtype(kernel, (dtype,), D=D[0])
        require(D[0].numel() == count, kernel, f"D has {D[0].numel()} elements, the products have {count}")
        flat = D[0].view(-1)
        ends = torch.tensor([value.numel() for value in values]).cumsum(0).tolist()
        outs = [flat[end - v.numel() : end].view(v.shape) for end, v in zip(ends, values, strict=True)]
    else:
        outs = [torch.empty(v.shape, dtype=torch_dtype(D_type)) for v in values] if D is None else D
    for i, (value, out) in enumerate(zip(values, outs, strict=True)):
        require(out.shape == value.shape, kernel, f"D[{i}] is {list(out.shape)}, expected {list(value.shape)}")
        if bias[i].numel() and grad:
            bias[i].copy_(rows(B[i]).float().sum(0))
        elif bias[i].numel():
            value = value + bias[i].float()
        if pre_gelu_out[i].numel():
            refusal("te_general_grouped_gemm with gelu")()
        out.copy_((value + out.float() if accumulate else value).reshape(out.shape))
    return bias if D is not None else list(outs)


KERNELS = (quantize, bgrad_quantize, generic_gemm, te_general_grouped_gemm)
