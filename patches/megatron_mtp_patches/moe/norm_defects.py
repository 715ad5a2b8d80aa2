"""The gradient norm of experts."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    context_parallel,
    data_parallel,
    expert_data_parallel,
    expert_parallel,
    expert_tensor_parallel,
    has_torch_dist_format,
    is_layer_wise,
    tensor_parallel,
)
from ..defects.declare import Defect, Gap, Sign

_MARKS_NO_EXPERTS = (
    Sign("megatron.core.extensions.transformer_engine:", lacks="param.allreduce = not use_expert_pgs"),
)
_MAKES_NEW_PARAMETERS = Gap(
    lambda run: run.use_megatron_fsdp and run.init_model_with_meta_device,
    when="--use-megatron-fsdp and --init-model-with-meta-device",
    because="Megatron-FSDP then makes new parameters of experts, which do not have its marks",
)


def _splits(run: Any) -> bool:
    """True if tensor-parallel ranks have different experts, or different shards of one."""
    return bool(run.num_experts and tensor_parallel(run) > 1 and expert_parallel(run) * expert_tensor_parallel(run) > 1)


def _has_grouped_experts(run: Any) -> bool:
    """True if these experts train and are grouped layers of TransformerEngine, which Bridge's adapters are not."""
    is_megatrons = run.transformer_impl == "local" or run.moe_use_legacy_grouped_gemm
    return bool(_splits(run) and run.moe_grouped_gemm and not is_megatrons and not run.trains_adapters)


_LAYERS = "megatron.core.tensor_parallel.layers"
_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer"
_IS_DUPLICATE = f"{_LAYERS}:param_is_not_tensor_parallel_duplicate"


def _has_biases(run: Any) -> bool:
    """True if experts have biases and tensor-parallel ranks different experts, or replicas of one.

    Megatron refuses biases if it splits each expert, and those of grouped experts beside a fused dropout.
    """
    is_grouped = run.moe_grouped_gemm and run.transformer_impl != "local"
    is_refused = run.expert_tensor_parallel_size != 1 or (is_grouped and run.bias_dropout_fusion)
    return bool(run.num_experts and tensor_parallel(run) > 1 and run.add_bias_linear and not is_refused)


def _deals_out(run: Any) -> bool:
    """True if tensor-parallel ranks update different parameters of experts, where ranks share out whole parameters.

    They share none out if each dense layer has one replica.
    """
    return expert_parallel(run) > 1 or data_parallel(run) * context_parallel(run) > 1


def _replicates_experts_alone(run: Any) -> bool:
    """True if experts have replicas and dense layers have none."""
    has_dense_replicas = data_parallel(run) * context_parallel(run) > 1
    return bool(run.num_experts and not has_dense_replicas and expert_data_parallel(run) > 1)


_REPLICATED = (  # the same in words
    "with --num-experts, no data or context parallelism, and --tensor-model-parallel-size larger than "
    "--expert-model-parallel-size times --expert-tensor-parallel-size"
)
_NO_REPLICAS = "--expert-model-parallel-size so large that no expert has replicas"
_SHARES_NOTHING_OUT = Sign(
    f"{_LAYER_WISE}.shard_params", has="self.dp_cp_params_list = None self.expt_dp_params_list = None return"
)


DEFECTS = (
    Defect(
        "ML-5916",
        "The gradient norm leaves out the experts of all tensor-parallel ranks but the first, so the log shows too "
        "small a norm and, with --clip-grad above 0, as by default, gradients are clipped too little",
        severity=4,
        signs=_MARKS_NO_EXPERTS,
        affects=lambda run: _has_grouped_experts(run) and run.transformer_engine >= (2, 13),
        when="--num-experts with --moe-grouped-gemm, --tensor-model-parallel-size > 1 and TransformerEngine >= 2.13, "
        "without --expert-tensor-parallel-size 1 or with --expert-model-parallel-size > 1, but not where adapters of "
        "Megatron-Bridge train instead",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="count-experts-in-grad-norm",
        unless=_MAKES_NEW_PARAMETERS,
        seen_by="norm",
        second_reading="linear layers of experts of 0.16.1 to 0.19.0 and of TransformerEngine 2.12, 2.14 and 2.16; the "
        "commit of #5916; its program; doctor of 0.17.1, 0.18.2 and 0.19.2 under its flags and just outside",
    ),
    Defect(
        "ML-5916b",
        "The gradient norm leaves out the biases of the experts of all tensor-parallel ranks but the first (with "
        "--transformer-impl local those of their second layers), so the log shows too small a norm and, with "
        "--clip-grad above 0, as by default, gradients are clipped too little",
        severity=3,
        signs=Sign(_IS_DUPLICATE, lacks="expert_tp_group"),
        affects=lambda run: _splits(run) and _has_biases(run),
        when="--num-experts with biases (which --moe-grouped-gemm allows with --no-bias-dropout-fusion), "
        "--tensor-model-parallel-size > 1, --expert-tensor-parallel-size 1 and --expert-model-parallel-size > 1",
        state="fixed in 0.19.0",
        evidence="reproduced",
        instead="--disable-bias-linear",
        patch="count-experts-in-grad-norm",
        unless=_MAKES_NEW_PARAMETERS,
        seen_by="norm",
        second_reading="linear layers of experts of 0.16.1 to 0.19.0, those of Megatron as well, and of "
        "TransformerEngine 2.16; the commit of #5916; its program on 0.18.2 and 0.19.2, with local experts, too; "
        "which biases grouped experts refuse; doctor of 0.17.1 and 0.18.2 under its flags and just outside",
    ),
    Defect(
        "ML-6099",
        "The gradient norm of layer-wise optimizers leaves out the biases of experts' second layers that other "
        "tensor-parallel ranks than the first update, so the log shows too small a norm and, with --clip-grad above 0, "
        "as by default, gradients are clipped too little",
        severity=3,
        signs=Sign(f"{_LAYER_WISE}.__init__", lacks="'expt_tp'"),
        fixed_by=Sign(_IS_DUPLICATE, lacks="expert_tp_group"),  # where ML-5916b says it of all optimizers
        # in other precisions such an optimizer ends in an error
        affects=lambda run: _has_biases(run) and _deals_out(run) and is_layer_wise(run) and run.bf16,
        when="--optimizer dist_muon, or another layer-wise one, with --bf16, --num-experts, biases (which "
        "--moe-grouped-gemm allows with --no-bias-dropout-fusion), --tensor-model-parallel-size > 1, "
        "--expert-tensor-parallel-size 1 and --expert-model-parallel-size > 1 or data or context parallelism",
        state="fixed on main",
        evidence="reproduced",
        instead="--disable-bias-linear",
        patch="count-experts-in-grad-norm",
        seen_by="norm",
        second_reading="the commit of #5916, which it completes; layer-wise optimizers of 0.18.2, 0.19.0 and main; "
        "pretrain_gpt.py of 0.19.0, which gives them no layout of buffers; its program on 0.19.2, and with EP 1 and 2 "
        "on two and four ranks, and in fp32 (an error); doctor under its flags and just outside",
    ),
    Defect(
        "norm-of-unsharded-experts",
        "The gradient norm of layer-wise optimizers counts each expert once for each of its replicas, where dense "
        "layers have none, so the log shows too large a norm and, with --clip-grad above 0, as by default, gradients "
        "are clipped too much",
        severity=3,
        signs=_SHARES_NOTHING_OUT,
        fixed_by=_MARKS_NO_EXPERTS,  # where ML-5916c says of the same runs that replicas of an expert drift apart
        affects=lambda run: _replicates_experts_alone(run) and is_layer_wise(run),
        when=f"--optimizer dist_muon, or another layer-wise one, {_REPLICATED}",
        evidence="reproduced",
        instead=_NO_REPLICAS,
        patch="count-experts-in-grad-norm",
        seen_by="norm",
    ),
    Defect(
        "save-of-unsharded-experts",
        "Saving a checkpoint ends in a CheckpointingException: each replica of an expert saves the same state of its "
        "optimizer as if it were the only one",
        kind="crash",
        severity=3,
        signs=_SHARES_NOTHING_OUT,
        affects=lambda run: (
            _replicates_experts_alone(run)
            and is_layer_wise(run)
            and run.save
            and not run.no_save_optim
            and has_torch_dist_format(run)
        ),
        when="--save in the format torch_dist, without --no-save-optim, and --optimizer dist_muon, or another "
        f"layer-wise one, {_REPLICATED}",
        evidence="reproduced",
        instead=_NO_REPLICAS,
        patch="count-experts-in-grad-norm",
    ),
    Defect(
        "ML-5916c",
        "Gradients of experts are averaged over the wrong ranks, so copies of an expert drift apart, or shards of one "
        "are mixed",
        severity=5,
        signs=_MARKS_NO_EXPERTS,
        affects=lambda run: (
            run.num_experts and expert_parallel(run) == 1 and expert_tensor_parallel(run) != tensor_parallel(run)
        ),
        when="--num-experts with --expert-model-parallel-size 1 and an --expert-tensor-parallel-size other than "
        "--tensor-model-parallel-size",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="count-experts-in-grad-norm",
        seen_by="copies",
        second_reading="linear layers of experts of 0.16.1 to 0.19.0, those of Megatron as well; the commit of #5916; "
        "its program; doctor of 0.17.1, 0.18.2 and 0.19.2 under its flags and just outside; the wrappers of its patch",
    ),
)
