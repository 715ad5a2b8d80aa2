"""Declares sum-gradients-of-repeated-weights."""

from ..declarations.shared_edits import MEGATRON_FSDP, MTP
from ..engine import Patch, PullRequest, Wrap

PATCH = Patch(
    id="sum-gradients-of-repeated-weights",
    summary="Keep the gradients of all depths of a repeated MTP head, and of all uses of the output weight under "
    "Megatron-FSDP",
    upstream=(PullRequest(6965, ended="merged after 2026-08-22"),),
    problem="A repeated MTP head (`mtp_use_repeated_layer`, Megatron's MTP layers) runs once for each depth. With "
    "fused weight gradients TransformerEngine adds the gradient of a call to `main_grad`, or overwrites `main_grad` "
    "if the call was told that it belongs to the first microbatch. Megatron tells only the first call, whose "
    "backward runs last: the gradients of the other depths are lost, in bf16 in the first microbatch after each start, "
    "with fp8 or fp4 in the first microbatch of each step. #6965 repairs that in bf16 only. Under Megatron-FSDP "
    "each fused gradient overwrites the one before. So attached heads lose the gradient of the output weight of all "
    "its uses but one.",
    adds=(
        "TransformerEngine's layers of a repeated head are called without `is_first_microbatch`. In fp8 and fp4 they "
        "quantize their weights in each call.",
        "Under Megatron-FSDP the repeated head and the output layer of attached heads do not fuse their weight "
        "gradients: autograd adds them up, in the dtype of the weight.",
    ),
    numerics="The gradients of a repeated head, and under Megatron-FSDP that of the output weight of attached heads, "
    "where weight gradients are fused. Nothing else changes.",
    is_repair=True,
    edits=(
        Wrap(
            f"{MTP}:MultiTokenPredictionBlock.__init__",
            "megatron_overrides.mtp.heads.repeated_heads:add_gradients_of_all_depths",
            check_source=False,
        ),
        *(
            Wrap(f"{wrapper}.__init__", "megatron_overrides.mtp.heads.repeated_heads:add_gradients_under_fsdp")
            for wrapper in MEGATRON_FSDP
        ),
    ),
)
