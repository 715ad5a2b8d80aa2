"""Declares train-heads-in-mcore-bridge."""

from ..engine import Patch, Wrap

_MODEL = "mcore_bridge.model.gpt_model:GPTModel"
_LAYER = "mcore_bridge.model.modules.mtp_layer:MultiTokenPredictionLayer"
_OVERRIDES = "megatron_overrides.frameworks.mcore_bridge"
_FROZEN = "megatron_overrides.mtp.frozen.frozen_main_model"

PATCH = Patch(
    id="train-heads-in-mcore-bridge",
    summary="Let the settings of MTP heads act in the models of mcore-bridge (ms-swift)",
    package="mcore-bridge",
    is_repair=True,
    problem="mcore-bridge, with which ms-swift trains Megatron models, has its own MTP layer and its own MTP loss. "
    "`mtp_detach_heads` is accepted there and detaches nothing, on native 0.19 too, while the heads are clipped "
    "separately and missing in the grad norm. Under tensor parallelism mcore-bridge counts the acceptance rate on "
    "each rank's part of the vocabulary. Under context parallelism it weighs tokens of heads by the counts of one "
    "rank. In passes without gradients it computes losses of the heads that are not used.",
    adds=(
        "Its GPT models train their heads by the losses of Megatron's models: `mtp_detach_heads`, `mtp_loss_type`, "
        "`mtp_depth_weights`, `mtp_position_weights`, `mtp_dpace_alpha`, `mtp_logits_chunk_size`, "
        "`mtp_acceptance_interval`, `mtp_acceptance_length_interval` and `freeze_base_model_for_mtp` act there, and "
        "`mtp_pass`. (Its hybrid models are Megatron's own.)",
        "The acceptance rate is that of the whole vocabulary under tensor parallelism.",
    ),
    refuses=(
        "Settings that act in Megatron's own trainer or validation alone, where such a model has heads: "
        "`mtp_loss_scaling_schedule`, `mtp_eval`, `disable_mtp_loss`.",
    ),
    undetected="Only runs under mcore-bridge have the defect.",
    numerics="With the settings, as on their pages; the acceptance rate, as above; under context parallelism, as on "
    "the page of `count-mtp-tokens-over-ranks`.",
    notes=("It patches mcore-bridge. If the package is not installed, the patch is pending.",),
    edits=(
        Wrap(f"{_MODEL}.__init__", f"{_OVERRIDES}:refuse_settings"),
        Wrap(f"{_MODEL}.__init__", f"{_FROZEN}:freeze_new_model"),
        Wrap(f"{_MODEL}._postprocess", f"{_OVERRIDES}:train_heads"),
        Wrap(f"{_MODEL}._postprocess", "megatron_overrides.mtp.forward_pass:record_forward_inputs"),
        Wrap(f"{_MODEL}.forward", f"{_FROZEN}:run_main_model_without_gradients", check_source=False),
        Wrap(f"{_LAYER}.forward", f"{_OVERRIDES}:mark_first_head"),
        Wrap(f"{_LAYER}._get_embeddings", "megatron_overrides.mtp.heads.detached_heads:detach_inputs"),
    ),
)
