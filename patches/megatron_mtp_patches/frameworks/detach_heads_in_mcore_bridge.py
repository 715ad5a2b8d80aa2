"""Declares detach-heads-in-mcore-bridge."""

from ..engine import Patch, Wrap

_MODEL = "mcore_bridge.model.gpt_model:GPTModel"
_MODEL_OVERRIDES = "megatron_overrides.frameworks.mcore_bridge"
_LAYER = "mcore_bridge.model.modules.mtp_layer:MultiTokenPredictionLayer"

PATCH = Patch(
    id="detach-heads-in-mcore-bridge",
    summary="Let --mtp-detach-heads act in the models of mcore-bridge (ms-swift)",
    package="mcore-bridge",
    problem=(
        "mcore-bridge, with which ms-swift trains Megatron models, has its own MTP layer and its own MTP loss. "
        "`mtp_detach_heads` is accepted there and detaches nothing, on native 0.19 too, while the heads are clipped "
        "separately and missing in the grad norm. Under tensor parallelism mcore-bridge counts the acceptance rate on "
        "each rank's part of the vocabulary."
    ),
    adds=(
        "With `mtp_detach_heads` no gradient of the MTP loss reaches the embedding, the main model or the output layer "
        "(of its GPT models; its hybrid models use Megatron's own layer).",
        "The acceptance rate is that of the whole vocabulary under tensor parallelism.",
    ),
    refuses=(
        "Settings that act in Megatron's own MTP loss alone, where such a model has heads: `mtp_loss_type`, "
        "`mtp_depth_weights`, `mtp_position_weights`, `mtp_dpace_alpha`, `mtp_loss_scaling_schedule`, "
        "`mtp_logits_chunk_size`, `mtp_acceptance_interval`, `mtp_acceptance_length_interval`, `mtp_eval`, "
        "`freeze_base_model_for_mtp`.",
    ),
    undetected="Only runs under mcore-bridge have the defect.",
    numerics="Only with `mtp_detach_heads`, as on the page of `detach-mtp-heads`; and the acceptance rate, as above.",
    notes=("It patches mcore-bridge. If the package is not installed, the patch is pending.",),
    edits=(
        Wrap(f"{_MODEL}.__init__", f"{_MODEL_OVERRIDES}:refuse_settings"),
        Wrap(f"{_MODEL}._postprocess", f"{_MODEL_OVERRIDES}:project_heads"),
        Wrap(f"{_LAYER}.forward", "megatron_overrides.frameworks.mcore_bridge:mark_first_head"),
        Wrap(f"{_LAYER}._get_embeddings", "megatron_overrides.mtp.heads.wrappers:detach_inputs"),
    ),
)
