"""Declares initialize-mtp-heads-in-megatron-bridge."""

from ..declarations.settings import Setting
from ..engine import Patch, Wrap

_OVERRIDES = "megatron_overrides.frameworks.bridge_heads"
_MTP_INIT = Setting(
    "mtp_init",
    str | None,
    None,
    "How to initialize the MTP heads that a Hugging Face checkpoint lacks: random or last-layer.",
    check="megatron_overrides.mtp.new_heads.checks:check_start",
    example="last-layer",
)

PATCH = Patch(
    id="initialize-mtp-heads-in-megatron-bridge",
    summary="Give MTP heads to a Hugging Face model that has none, in Megatron-Bridge",
    package="Megatron-Bridge",
    problem="`--mtp-init` acts in Megatron-LM's trainer alone. Megatron-Bridge leaves MTP heads (Megatron's MTP "
    "layers) uninitialized if a Hugging Face checkpoint lacks their weights.",
    adds=(
        "`model.mtp_init`: after Bridge has loaded such a checkpoint, the heads are initialized. `random` leaves them "
        "as they were built; `last-layer` copies the last decoder layer and the final norm of the main model into each "
        "head. The model is built initialized then, whatever `model.perform_initialization` says.",
        "A checkpoint that has the heads is loaded as before; so is a Megatron checkpoint, from which a run resumes.",
    ),
    undetected="It adds a way to start; without it `refuse-uninitialized-heads-in-megatron-bridge` ends the run.",
    refuses=(
        "`model.mtp_init` where a Hugging Face checkpoint has some of the weights of the heads, or the model no heads.",
        "`model.mtp_init=last-layer` where a head has another kind of layer than the end of the main model.",
    ),
    numerics="Only with the field: it decides with which values the heads start.",
    notes=(
        "It patches Megatron-Bridge. If the package is not installed, the patch is pending.",
        "A Megatron checkpoint without heads cannot be loaded by Megatron-Bridge, with the field or without.",
    ),
    edits=(
        _MTP_INIT.field_edit("megatron.bridge.models.transformer_config:TransformerConfig"),
        Wrap(
            "megatron.bridge.models.model_provider:ModelProviderMixin.provide_distributed_model",
            f"{_OVERRIDES}:initialize_model",
            check_source=False,
        ),
        Wrap(
            "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge.load_weights_hf_to_megatron",
            f"{_OVERRIDES}:initialize_heads",
        ),
    ),
)
