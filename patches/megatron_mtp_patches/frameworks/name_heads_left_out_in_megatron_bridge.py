"""Declares name-heads-left-out-in-megatron-bridge."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="name-heads-left-out-in-megatron-bridge",
    summary="Warn by name of MTP heads that an export of Megatron-Bridge leaves out",
    package="Megatron-Bridge",
    problem="`AutoBridge.from_hf_pretrained(base)` exports only tensors whose names `base` has. If MTP heads "
    "(Megatron's MTP layers) were added to it, `export_ckpt`, `save_hf_pretrained` and `export_hf_weights` leave all "
    "of them out, and end with 0.",
    adds=("A warning that names the heads and what exports them: `AutoBridge.from_hf_config(config)`.",),
    undetected="Only exports of Megatron-Bridge have the defect, and they have no flags.",
    numerics="None.",
    unasked="An export of Megatron-Bridge warns of MTP heads that it leaves out.",
    notes=(
        "It patches Megatron-Bridge. If the package is not installed, the patch is pending.",
        "The warning is that of the last rank. Exports with quantization have none.",
    ),
    edits=(
        Wrap(
            "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge.stream_weights_megatron_to_hf",
            "megatron_overrides.frameworks.bridge_heads:name_heads_left_out",
        ),
    ),
)
