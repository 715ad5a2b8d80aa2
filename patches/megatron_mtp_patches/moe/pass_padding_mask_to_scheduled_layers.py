"""Declares pass-padding-mask-to-scheduled-layers."""

from ..engine import Patch, Wrap

_OVERRIDES = "megatron_overrides.moe.scheduled_layers"

PATCH = Patch(
    id="pass-padding-mask-to-scheduled-layers",
    summary="Give routers the padding mask under the overlap of expert-parallel communication",
    problem=(
        "With `--overlap-moe-expert-parallel-comm` a schedule runs the parts of each layer, and calls routers without "
        "the padding mask that the model was given. So padding counts in the auxiliary losses and the z-loss, as it "
        "does not without the overlap. Megatron's own trainer passes no mask; Megatron-Bridge does."
    ),
    adds=("Routers get the mask of their microbatch, in the main model and in MTP heads.",),
    numerics=(
        "With the flag and a padding mask: the gradients of MoE losses and what is logged of them are those without "
        "the overlap."
    ),
    notes=(
        "Layers that CUDA graphs replay keep what they captured. Routers with an expert bias or quantile balancing get "
        "no mask, because those of released Megatron end in an error with one (NVIDIA/Megatron-LM#6114).",
    ),
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables",
            f"{_OVERRIDES}:schedule_with_mask",
        ),
        Wrap("megatron.core.transformer.moe.moe_layer:MoELayer.route", f"{_OVERRIDES}:route_with_mask"),
    ),
)
