"""Stands for Apex's `fused_weight_gradient_mlp_cuda`, with which Megatron's own linear layers accumulate gradients.

Source: apex/csrc/megatron/fused_weight_gradient_dense.cpp.
"""

from __future__ import annotations

from torch import Tensor

from .kernel import rows


def wgrad_gemm_accum_fp32(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """main_grad += grad_output^T @ input over all rows, in fp32."""
    main_grad.add_(rows(grad_output).float().t() @ rows(input).float())


def wgrad_gemm_accum_fp16(input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Do the same for a gradient of 16 bits."""
    wgrad_gemm_accum_fp32(input, grad_output, main_grad)
