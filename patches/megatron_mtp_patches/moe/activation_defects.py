"""Mixture of experts: activation functions."""

from __future__ import annotations

from typing import Any

from ..defects.declare import Defect, Sign


def _clamps_swiglu(run: Any) -> bool:
    """True if the inputs of SwiGLU are to be clamped."""
    is_silu = getattr(run.activation_func, "__name__", "") == "silu" and run.gated_linear_unit
    return run.activation_func_clamp_value is not None and bool(run.swiglu or is_silu)


def _clamps_everywhere(run: Any) -> bool:
    """True if no fused kernel computes SwiGLU, and no layer that has no clamp."""
    is_fused = run.bias_activation_fusion if run.bias_swiglu_fusion is None else run.bias_swiglu_fusion
    is_fused = is_fused or run.use_te_activation_func or run.use_transformer_engine_op_fuser
    return not (is_fused or run.moe_shared_expert_overlap)


DEFECTS = (
    Defect(
        id="ML-5940",
        effect="The clamp of SwiGLU's inputs is left out silently wherever a fused kernel computes SwiGLU, as it does "
        "by default, and in shared experts that overlap with communication",
        severity=3,
        signs=Sign("megatron.core.fusions.fused_bias_swiglu:bias_swiglu_impl", lacks="clamp_value"),
        affects=lambda run: _clamps_swiglu(run) and not _clamps_everywhere(run),
        when="--swiglu with --activation-func-clamp-value, without --no-bias-swiglu-fusion, or with "
        "--moe-shared-expert-overlap, --use-te-activation-func or --use-transformer-engine-op-fuser",
        instead="add --no-bias-swiglu-fusion, and leave those flags out",
        state="fixed on main",
        evidence="reproduced",
        second_reading="dense layers, experts, shared experts and the fused layers of 0.16.1, 0.18.2, 0.19.0 and main; "
        "its program on 0.18.2; doctor under its flags and just outside",
    ),
)
