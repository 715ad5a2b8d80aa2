"""Stands for Apex's `fused_weight_gradient_mlp_cuda`, with which Megatron's own linear layers accumulate gradients.

Source: apex/csrc/megatron/fused_weight_gradient_dense.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel import require_contiguous, require_dtype, rows


def wgrad_gemm_accum_fp32(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad_output^T @ input over all rows, in fp32."""
    _check("wgrad_gemm_accum_fp32", input, grad_output, main_grad, torch.float32)
    _accumulate(input, grad_output, main_grad)


def wgrad_gemm_accum_fp16(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Do the same for a gradient of 16 bits."""
    _check("wgrad_gemm_accum_fp16", input, grad_output, main_grad, input.dtype)
    require_dtype("wgrad_gemm_accum_fp16", (torch.float16, torch.bfloat16), input=input)
    _accumulate(input, grad_output, main_grad)


def _check(kernel: str, input: Tensor, grad_output: Tensor, main_grad: Tensor, dtype: torch.dtype) -> None:
    require_dtype(kernel, (torch.float32, torch.float16, torch.bfloat16), input=input)
    require_dtype(kernel, (input.dtype,), grad_output=grad_output)
    require_dtype(kernel, (dtype,), main_grad=main_grad)
    require_contiguous(kernel, input=input, grad_output=grad_output, main_grad=main_grad)


def _accumulate(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    main_grad.add_(rows(grad_output).float().t() @ rows(input).float())
