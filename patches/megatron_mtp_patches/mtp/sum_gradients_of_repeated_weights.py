"""Declares sum-gradients-of-repeated-weights."""

from __future__ import annotations

from ..engine import Defect, Patch, PullRequest, Wrap
from ..shared_edits import MEGATRON_FSDP, MTP

TYPE_CHECKING = False  # as in engine/engine.py: typing itself is not imported
if TYPE_CHECKING:
    from typing import Any


def _fuses_gradients(run: Any) -> bool:
    return run.gradient_accumulation_fusion is not False


def _is_repeated(run: Any) -> bool:
    return bool(run.mtp_use_repeated_layer and (run.mtp_num_layers or 0) > 1)


def _loses_depths(run: Any) -> bool:
    uses_transformer_engine = (run.transformer_impl or "transformer_engine") == "transformer_engine"
    return _is_repeated(run) and uses_transformer_engine and _fuses_gradients(run)


def _loses_uses_of_output_weight(run: Any) -> bool:
    return bool(
        run.mtp_num_layers
        and run.use_megatron_fsdp
        and not run.mtp_detach_heads
        and not run.freeze_base_model_for_mtp
        and _fuses_gradients(run)
    )


PATCH = Patch(
    id="sum-gradients-of-repeated-weights",
    summary="Keep the gradients of all depths of a repeated MTP head, and of all uses of the output weight under "
    "Megatron-FSDP",
    upstream=(PullRequest(6965),),
    problem=(
        "A repeated MTP head (`mtp_use_repeated_layer`, Megatron's MTP layers) runs once for each depth. With fused "
        "weight gradients TransformerEngine adds the gradient of a call to `main_grad`, or overwrites `main_grad` if "
        "the call was told that it belongs to the first microbatch. Megatron tells only the first call, whose "
        "backward runs last: the gradients of the other depths are lost, in bf16 in the first step after each start, "
        "with fp8 or fp4 in the first microbatch of each step. Main has #6965, which repairs bf16. Under "
        "Megatron-FSDP each fused gradient overwrites the one before. So attached heads lose the gradient of the "
        "output weight of all its uses but one."
    ),
    adds=(
        "TransformerEngine's layers of a repeated head are called without `is_first_microbatch`. In fp8 and fp4 they "
        "quantize their weights in each call.",
        "Under Megatron-FSDP the repeated head and the output layer of attached heads do not fuse their weight "
        "gradients: autograd adds them up, in the dtype of the weight.",
    ),
    defects=(
        Defect(
            "A repeated MTP head loses the gradients of all depths but one: in bf16 in the first step, in fp8 and fp4 "
            "in the first microbatch of each step",
            releases=("0.17.1", "0.18.2", "0.19.2"),
            affects=lambda run: _loses_depths(run) and not run.use_megatron_fsdp,
        ),
        Defect(
            "Under Megatron-FSDP the output weight of attached MTP heads keeps the gradient of only one of its uses",
            releases=("0.16.1", "0.17.1", "0.18.2", "0.19.2", "main"),
            affects=_loses_uses_of_output_weight,
        ),
        Defect(
            "Under Megatron-FSDP a repeated MTP head keeps the gradient of only one of its depths",
            releases=("0.17.1", "0.18.2", "0.19.2", "main"),
            affects=lambda run: _is_repeated(run) and run.use_megatron_fsdp and _fuses_gradients(run),
        ),
    ),
    numerics=(
        "The gradients of a repeated head, and under Megatron-FSDP that of the output weight of attached heads, where "
        "weight gradients are fused. Nothing else changes."
    ),
    edits=(
        Wrap(
            f"{MTP}:MultiTokenPredictionBlock.__init__",
            "megatron_overrides.mtp.heads.wrappers:add_gradients_of_all_depths",
            check_source=False,
        ),
        *(
            Wrap(f"{wrapper}.__init__", "megatron_overrides.mtp.heads.wrappers:add_gradients_under_fsdp")
            for wrapper in MEGATRON_FSDP
        ),
    ),
)
