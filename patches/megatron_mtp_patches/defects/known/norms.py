"""Gradient norms, clipping and skipped updates."""

from __future__ import annotations

import math
from typing import Any

from ..conditions import expert_parallel, expert_tensor_parallel, is_layer_wise, tensor_parallel, type_name
from ..declare import Defect, Sign

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_SKIP = "grad_norm > grad_norm_skip_threshold"
_SKIPS_IN_CHAIN = (
    Sign(f"{_OPTIMIZER}:ChainedOptimizer.step", has=_SKIP),
    Sign(f"{_OPTIMIZER}:ChainedOptimizer.step", has="grad_norm > optimizer.config.grad_norm_skip_threshold"),
)
_LAYERS = "megatron.core.tensor_parallel.layers"
_IS_DUPLICATE = f"{_LAYERS}:param_is_not_tensor_parallel_duplicate"
_MARKS_NO_EXPERTS = (
    Sign("megatron.core.extensions.transformer_engine:", lacks="param.allreduce = not use_expert_pgs"),
)


def _has_threshold(run: Any) -> bool:
    threshold = run.grad_norm_skip_threshold
    return threshold is not None and math.isfinite(threshold)


def _splits(run: Any) -> bool:
    """Whether the run has experts and dense layers that are split over ranks."""
    return bool(run.num_experts and tensor_parallel(run) > 1)


def _has_grouped_experts(run: Any) -> bool:
    """Whether these experts are grouped layers of TransformerEngine."""
    is_megatrons = run.transformer_impl == "local" or run.moe_use_legacy_grouped_gemm
    return bool(_splits(run) and run.moe_grouped_gemm and not is_megatrons)


def _has_biases(run: Any) -> bool:
    """Whether these experts have biases, which Megatron refuses if it splits each expert."""
    return bool(_splits(run) and run.add_bias_linear and run.expert_tensor_parallel_size == 1)


DEFECTS = (
    Defect(
        "ML-3460",
        "Ranks that own no main parameters take the update that the others skip, and hang or diverge",
        kind="hang",
        severity=4,
        signs=_SKIPS_IN_CHAIN,
        affects=_has_threshold,
        when="--grad-norm-skip-threshold",
        links=(),
        introduced_by=("NVIDIA/Megatron-LM#3460",),
        state="unreported",
        evidence="reproduced",
        only_if="a rank owns no main parameters",
        patch="skip-update-on-large-grad-norm",
    ),
    Defect(
        "ML-3460b",
        "An update whose gradient norm is NaN is not skipped",
        kind="wrong numbers",
        severity=3,
        signs=_SKIPS_IN_CHAIN,
        affects=_has_threshold,
        when="--grad-norm-skip-threshold",
        links=(),
        introduced_by=("NVIDIA/Megatron-LM#3460",),
        state="unreported",
        evidence="reproduced",
        patch="skip-update-on-large-grad-norm",
    ),
    Defect(
        "ML-3460c",
        "Megatron-FSDP ignores --grad-norm-skip-threshold",
        kind="wrong numbers",
        severity=3,
        signs=_SKIPS_IN_CHAIN,
        affects=lambda run: _has_threshold(run) and run.use_megatron_fsdp,
        when="--grad-norm-skip-threshold with --use-megatron-fsdp",
        links=(),
        introduced_by=("NVIDIA/Megatron-LM#3460",),
        state="unreported",
        evidence="reproduced",
        patch="skip-update-on-large-grad-norm",
    ),
    Defect(
        "ML-4116",
        "Ranks clip the MTP heads by different norms, because that norm is reduced over the wrong ranks",
        kind="wrong numbers",
        severity=4,
        signs=(Sign(f"{_OPTIMIZER}:copy_optimizer_param_metadata"),),
        affects=lambda run: run.mtp_detach_heads and is_layer_wise(run),
        when="--mtp-detach-heads with --optimizer dist_muon, or muon with use_layer_wise_distributed_optimizer",
        links=(),
        introduced_by=("NVIDIA/Megatron-LM#4116",),
        state="unreported",
        evidence="reproduced",
        patch="clip-mtp-grads-separately",
    ),
    Defect(
        "ML-4116b",
        "The MTP heads are clipped by the norm of the main model, because Megatron-FSDP loses their tag",
        kind="wrong numbers",
        severity=3,
        signs=(Sign(f"{_OPTIMIZER}:copy_optimizer_param_metadata"),),
        affects=lambda run: run.mtp_detach_heads and run.use_megatron_fsdp,
        when="--mtp-detach-heads with --use-megatron-fsdp",
        links=(),
        introduced_by=("NVIDIA/Megatron-LM#4116",),
        state="unreported",
        evidence="reproduced",
        patch="clip-mtp-grads-separately",
    ),
    Defect(
        "ML-5916",
        "The gradient norm leaves out the experts of all tensor-parallel ranks but the first, so gradients are clipped "
        "too little",
        kind="wrong numbers",
        severity=4,
        signs=_MARKS_NO_EXPERTS,
        affects=lambda run: _has_grouped_experts(run) and run.transformer_engine >= (2, 13),
        when="--num-experts with --moe-grouped-gemm, --tensor-model-parallel-size > 1 and TransformerEngine >= 2.13",
        links=("NVIDIA/Megatron-LM#5916",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="count-experts-in-grad-norm",
    ),
    Defect(
        "ML-5916b",
        "The gradient norm leaves out the biases of experts",
        kind="wrong numbers",
        severity=3,
        signs=(Sign(_IS_DUPLICATE, lacks="expert_tp_group"),),
        affects=lambda run: _has_biases(run) and run.transformer_impl != "local",
        when="--num-experts with biases, --tensor-model-parallel-size > 1 and --expert-tensor-parallel-size 1",
        links=("NVIDIA/Megatron-LM#5916",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        instead="--disable-bias-linear",
        patch="count-experts-in-grad-norm",
    ),
    Defect(
        "ML-6099",
        "The gradient norm of dist_muon leaves out the biases of experts",
        kind="wrong numbers",
        severity=3,
        signs=(
            Sign(
                "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.__init__", lacks="'expt_tp'"
            ),
        ),
        fixed_by=(Sign(_IS_DUPLICATE, lacks="expert_tp_group"),),  # where ML-5916b says it of all optimizers
        affects=lambda run: _has_biases(run) and is_layer_wise(run),
        when="--optimizer dist_muon with --num-experts, biases, --tensor-model-parallel-size > 1 and "
        "--expert-tensor-parallel-size 1",
        links=("NVIDIA/Megatron-LM#6099",),
        state="fixed on main",
        evidence="reproduced",
        instead="--disable-bias-linear",
        patch="count-experts-in-grad-norm",
    ),
    Defect(
        "ML-5916c",
        "Gradients of experts are averaged over the wrong ranks, so copies of an expert drift apart, or shards of one "
        "are mixed",
        kind="wrong numbers",
        severity=5,
        signs=_MARKS_NO_EXPERTS,
        affects=lambda run: (
            run.num_experts and expert_parallel(run) == 1 and expert_tensor_parallel(run) != tensor_parallel(run)
        ),
        when="--num-experts with --expert-model-parallel-size 1 and an --expert-tensor-parallel-size other than "
        "--tensor-model-parallel-size",
        links=("NVIDIA/Megatron-LM#5916",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="count-experts-in-grad-norm",
    ),
    Defect(
        "ML-7338",
        "The norm of gradients in bf16 and fp32 is wrong and clipping changes some of them wrongly, because a kernel "
        "reads all of them in the dtype of the first; or the step ends in an illegal memory access",
        kind="wrong numbers",
        severity=3,
        signs=(Sign("megatron.core.optimizer.clip_grads:get_grad_norm_fp32", has="[grads_for_norm], False"),),
        affects=lambda run: run.use_precision_aware_optimizer and type_name(run.main_grads_dtype) == "bfloat16",
        when="--use-precision-aware-optimizer with --main-grads-dtype bf16",
        only_if="the model keeps some parameters in fp32",
        instead="--main-grads-dtype fp32",
        links=("NVIDIA/Megatron-LM#7338", "NVIDIA/Megatron-LM#7279"),
        state="open",
        evidence="reproduced",
        patch="read-gradients-in-their-dtype",
    ),
    Defect(
        "ML-5530",
        "The largest gradient as the norm ends in a ValueError on ranks without gradients that count",
        kind="crash",
        severity=3,
        signs=(
            Sign(
                "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
                has="total_norm = max((grad.abs().max() for grad in grads_for_norm))",
            ),
        ),
        affects=lambda run: False,  # Megatron asks for the 2-norm
        when="get_grad_norm_fp32 with norm_type=inf, for which Megatron itself does not ask",
        only_if="a rank trains no parameter",
        links=("NVIDIA/Megatron-LM#5530",),
        state="fixed in 0.19.0",
        evidence="reproduced",
    ),
)
