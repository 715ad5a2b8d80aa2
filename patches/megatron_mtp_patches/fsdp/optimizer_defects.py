"""The optimizer under Megatron-FSDP."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import expert_parallel, has_megatron_fsdp, loads_model_only, tensor_parallel, type_name
from ..defects.declare import Defect, Sign

_NO_MASTER_WEIGHTS = "setattr(optimizer_part.optimizer, 'master_weights', False)"
_MAKE = "megatron.core.optimizer:get_megatron_optimizer"


_COUNTS_ZEROS = (
    "--log-num-zeros-in-grad with --use-megatron-fsdp and --use-precision-aware-optimizer (without --fp8-recipe other "
    "than delayed, unless --main-params-dtype is fp16)"
)


def _has_decoupled_gradients(run: Any) -> bool:
    """True if main parameters should be the optimizer's own; in fp8 they are with delayed scaling alone."""
    is_plain = run.fp8_recipe in (None, "delayed") or type_name(run.main_params_dtype) not in ("", "float32")
    return bool(run.use_precision_aware_optimizer and is_plain)


def _counts_zeros(run: Any) -> bool:
    return bool(run.use_megatron_fsdp and run.log_num_zeros_in_grad and _has_decoupled_gradients(run))


def _has_several_meshes(run: Any) -> bool:
    """True if the gradients lie on different meshes of ranks, as those of experts do, or on one of two dimensions."""
    instances = run.num_distributed_optimizer_instances or 1
    return bool(run.num_experts or expert_parallel(run) > 1 or tensor_parallel(run) * instances > 1)


DEFECTS = (
    Defect(
        "ML-4133",
        "Megatron-FSDP trains nothing and prints no error: FusedAdam looks for the gradients under another name",
        severity=5,
        signs=Sign(_MAKE, lacks=_NO_MASTER_WEIGHTS),
        # The optimizer on the CPU looks for either name.
        affects=lambda run: run.use_megatron_fsdp and _has_decoupled_gradients(run) and not run.optimizer_cpu_offload,
        when="--use-megatron-fsdp with --use-precision-aware-optimizer, without --optimizer-cpu-offload and without "
        "--fp8-recipe other than delayed (unless --main-params-dtype is fp16)",
        state="fixed in 0.18.0",
        evidence="reproduced",
        instead="leave out --use-precision-aware-optimizer",
        patch="fsdp-without-master-weights",
        seen_by="moves",
        second_reading="the optimizer's setup and its configuration of 0.16.1 to main; its program on 0.17.1; doctor "
        "under its flags and just outside",
    ),
    Defect(
        "ML-4133b",
        "Loading a checkpoint without its optimizer ends in a NotImplementedError of reload_model_params",
        kind="crash",
        severity=3,
        signs=Sign(_MAKE, has=_NO_MASTER_WEIGHTS),
        affects=lambda run: has_megatron_fsdp(run) and loads_model_only(run) and (run.bf16 or run.fp16),
        when="--use-megatron-fsdp with --pretrained-checkpoint, or with --load and --finetune or --no-load-optim, in "
        "bf16 or fp16",
        only_if="--load has a checkpoint, or has none where --pretrained-checkpoint is given",
        introduced_by=("NVIDIA/Megatron-LM#4133",),
        evidence="reproduced",
        patch="fsdp-without-master-weights",
        second_reading="the optimizer's setup of 0.16.1 to main; its program on 0.19.2; doctor under its flags and "
        "just outside",
    ),
    Defect(
        "ML-4802",
        "--log-num-zeros-in-grad counts each zero as often as there are data-parallel ranks",
        kind="wrong log",
        severity=1,
        signs=Sign("megatron.core.optimizer.clip_grads:count_zeros_fp32", has="param.grad is not None"),
        fixed_by=Sign(_MAKE, lacks=_NO_MASTER_WEIGHTS),
        affects=lambda run: _counts_zeros(run) and not _has_several_meshes(run),
        when=f"{_COUNTS_ZEROS}, without --num-experts, and with --tensor-model-parallel-size and "
        "--num-distributed-optimizer-instances 1 (else the first step ends in an error: ML-4802b)",
        instead="leave out --use-precision-aware-optimizer, and the data types that need it",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="fsdp-without-master-weights",
        second_reading="the count, the meshes of gradients and the optimizer's setup of 0.17.1, 0.18.2 and 0.19.0; its "
        "program on 0.18.2, also with experts, two tensor-parallel ranks and two instances; doctor under its flags and "
        "just outside",
    ),
    Defect(
        "ML-4802b",
        "--log-num-zeros-in-grad ends the first step in an error, an AssertionError where the model has experts: zeros "
        "are counted as if all gradients lay on one mesh of ranks with one dimension",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.optimizer.clip_grads:count_zeros_fp32",
            has=("param.grad is not None", "get_data_parallel_group_if_dtensor(grad_obj, data_parallel_group)"),
        ),
        fixed_by=Sign(_MAKE, lacks=_NO_MASTER_WEIGHTS),
        affects=lambda run: _counts_zeros(run) and _has_several_meshes(run),
        when=f"{_COUNTS_ZEROS}, and with --num-experts, or --tensor-model-parallel-size or "
        "--num-distributed-optimizer-instances > 1",
        instead="leave out --log-num-zeros-in-grad",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="fsdp-without-master-weights",
    ),
)
