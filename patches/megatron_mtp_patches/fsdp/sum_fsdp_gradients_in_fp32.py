"""Declares sum-fsdp-gradients-in-fp32."""

from ..engine import Patch, Wrap

_ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"

PATCH = Patch(
    id="sum-fsdp-gradients-in-fp32",
    summary="Add up and reduce the gradients of Megatron-FSDP in fp32 where the log says so",
    problem="From 0.19 on (#5462) Megatron-FSDP no longer reads `grad_reduce_in_fp32`. Unless "
    "`--megatron-fsdp-main-grads-dtype` is set, gradients are added up and reduced in the dtype of the parameters, "
    "bf16, although validate_args sets `--accumulate-allreduce-grads-in-fp32` and prints that gradients are "
    "accumulated and reduced in fp32. In bf16 a sum of equal gradients stays at 256 of them, and small gradients "
    "vanish next to the sum of many microbatches.",
    adds=(
        "`megatron_fsdp_main_grads_dtype` is fp32 where it is None and `grad_reduce_in_fp32` is set, as 0.18 has it. "
        "Gradients are reduced in the same dtype unless `--megatron-fsdp-grad-comm-dtype` names another.",
    ),
    numerics="With Megatron-FSDP, bf16 or fp16, and `--accumulate-allreduce-grads-in-fp32`, which bf16 implies: all "
    "gradients (0.19.2, main).",
    notes=(
        "Gradients take 4 bytes in place of 2 for each parameter of a rank's shard (of the whole model with `no_shard` "
        "and `optim`), in memory and in the reduce-scatter, as in 0.18. `--megatron-fsdp-main-grads-dtype bf16` keeps "
        "0.19's.",
    ),
    is_repair=True,
    edits=tuple(
        Wrap(
            f"{_ADAPTER}:FullyShardedDataParallel{version}.__init__",
            "megatron_overrides.fsdp.gradient_sums:sum_gradients_in_fp32",
        )
        for version in ("", "V1", "V2")
    ),
)
