"""Declares refuse-uninitialized-heads-in-megatron-bridge."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="refuse-uninitialized-heads-in-megatron-bridge",
    summary="Refuse MTP heads that a Hugging Face checkpoint lacks and Megatron-Bridge does not initialize",
    package="Megatron-Bridge",
    problem="Megatron-Bridge builds a model that it loads from Hugging Face without initializing it. If config.json "
    "declares MTP heads (Megatron's MTP layers) whose weights the checkpoint lacks, as transformers saves "
    "DeepSeek-V3, Bridge warns `Can't find ... in hf_keys` and the heads stay uninitialized memory: whatever was "
    "there is trained, saved and exported.",
    adds=("The load ends with an error on all ranks that names the parameters and what to set.",),
    undetected="Only runs under Megatron-Bridge have the defect, and only the checkpoint tells.",
    refuses=(
        "Loading heads that the checkpoint lacks while `model.perform_initialization` is False, which Bridge sets.",
    ),
    numerics="None.",
    unasked="Megatron-Bridge ends a run that loads a Hugging Face checkpoint without the MTP heads that its "
    "config.json declares, if nothing initializes them.",
    notes=(
        "It patches Megatron-Bridge. If the package is not installed, the patch is pending.",
        "verl builds the model initialized, so the heads are random there and this does not refuse them; "
        "`refuse-heads-that-verl-cannot-save` does.",
        "It also refuses such a load if a Megatron checkpoint with the heads is loaded afterwards, or if the model "
        "is only converted or used without its heads: set `model.mtp_init` there as well.",
    ),
    edits=(
        Wrap(
            "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge.load_weights_hf_to_megatron",
            "megatron_overrides.frameworks.bridge_heads:refuse_uninitialized_heads",
        ),
    ),
)
