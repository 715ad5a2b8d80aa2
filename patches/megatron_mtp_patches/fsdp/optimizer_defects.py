"""The optimizer under Megatron-FSDP."""

from ..defects.conditions import has_megatron_fsdp, loads_model_only
from ..defects.declare import Defect, Sign

_NO_MASTER_WEIGHTS = "setattr(optimizer_part.optimizer, 'master_weights', False)"
_MAKE = "megatron.core.optimizer:get_megatron_optimizer"

DEFECTS = (
    Defect(
        "ML-4133",
        "Megatron-FSDP trains nothing and prints no error: FusedAdam looks for the gradients under another name",
        severity=5,
        signs=Sign(_MAKE, lacks=_NO_MASTER_WEIGHTS),
        affects=lambda run: (  # the optimizer on the CPU looks for either name
            run.use_megatron_fsdp and run.use_precision_aware_optimizer and not run.optimizer_cpu_offload
        ),
        when="--use-megatron-fsdp with --use-precision-aware-optimizer, without --optimizer-cpu-offload",
        state="fixed in 0.18.0",
        evidence="reproduced",
        instead="leave out --use-precision-aware-optimizer",
        patch="fsdp-without-master-weights",
        seen_by="moves",
        second_reading="the optimizer's setup of 0.16.1 to main; its program on 0.17.1; doctor under its flags and "
        "just outside",
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
        affects=lambda run: run.use_megatron_fsdp and run.use_precision_aware_optimizer and run.log_num_zeros_in_grad,
        when="--log-num-zeros-in-grad with --use-megatron-fsdp and --use-precision-aware-optimizer",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="fsdp-without-master-weights",
        second_reading="the count and the optimizer's setup of 0.17.1, 0.18.2 and 0.19.0; its program on 0.18.2; "
        "doctor under its flags",
    ),
)
