"""Declares add-fsdp-gradients-of-single-replicas."""

from ..declarations.shared_edits import MEGATRON_FSDP
from ..engine import Patch, Wrap

PATCH = Patch(
    id="add-fsdp-gradients-of-single-replicas",
    summary="Add up the gradients of all microbatches where Megatron-FSDP has one replica of a layer",
    problem="With `optim_grads` and `optim_grads_params` Megatron-FSDP does not shard the gradients of layers that one "
    "rank of their group has: experts where `--expert-model-parallel-size` is the data-parallel size, or the whole "
    "model on one data-parallel rank. It still reduces them in each microbatch. With "
    "fused weight gradients, the default, each microbatch overwrites the one before, so only the last "
    "one counts; without it, gradients of earlier microbatches are divided by the data-parallel size with each "
    "later one. 0.16.1 also adds them to themselves in each microbatch, later releases where "
    "`--megatron-fsdp-grad-comm-dtype` differs from the type of the gradients (NVIDIA/Megatron-LM#6660). Nothing "
    "in the log shows it.",
    adds=("Such gradients have a shard, which is all of them, and each microbatch is added to it.",),
    numerics="With Megatron-FSDP's `optim_grads` and `optim_grads_params`, several microbatches (0.16.1: also one) and "
    "layers with one replica: their gradients, and with them the gradient norm.",
    notes=(
        "These gradients take one more temporary buffer of the size of a bucket, as sharded ones do, and each "
        "microbatch copies them once.",
        "A repeated MTP layer under full recomputation keeps Megatron's buffers, and with it all weights in the same: "
        "each of its depths has a backward pass that would overwrite a shard.",
    ),
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer:DataParallelBuffer.__init__",
            "megatron_overrides.fsdp.gradient_sums:shard_gradients_of_single_replicas",
        ),
        *(
            Wrap(f"{wrapper}.__init__", "megatron_overrides.fsdp.gradient_sums:mark_recomputed_depths")
            for wrapper in MEGATRON_FSDP
        ),
    ),
)
