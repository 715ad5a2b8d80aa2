"""Refuse what cannot work while only the MTP heads train, or only the main model."""

from __future__ import annotations

from typing import Any

from megatron_overrides.mtp.frozen.trained_parts import are_heads_disabled, is_main_model_frozen
from megatron_overrides.mtp.heads.checks import refuse_deferred_output_layer
from megatron_overrides.settings.checks import refuse_others, spell

# A setting, its value when it is off, and what it does.
_NOT_BESIDE_FROZEN_MAIN_MODEL = (
    ("freeze_base_for_mtp", False, "freezes the main model in a second way, that of megatron.post_training"),
    ("qad_train_target", None, "chooses in a second way what trains"),
    ("freeze_all_layers", False, "also freezes the heads"),
    ("overlap_moe_expert_parallel_comm", False, "schedules the backward pass of layers that have none"),
    ("cuda_graph_impl", "none", "captures a backward pass of layers that have none"),
    ("qk_clip", False, "scales the weights of the main model"),
    ("cpu_offloading", False, "offloads activations that the main model does not keep"),
    ("fine_grained_activation_offloading", False, "offloads activations that the main model does not keep"),
    ("moe_paged_stash", False, "keeps activations for a backward pass that the main model does not run"),
)
_NOT_BESIDE_DISABLED_HEADS = (
    ("freeze_base_model_for_mtp", False, "trains only the MTP heads"),
    ("freeze_base_for_mtp", False, "trains only the MTP heads"),
    ("qad_train_target", None, "chooses in a second way what trains"),
    ("overlap_moe_expert_parallel_comm", False, "schedules the heads as layers"),
    ("cuda_graph_impl", "none", "also captures the heads"),
    ("moe_paged_stash", False, "asks the experts of the heads for their load"),
)


def check_frozen_main_model(settings: Any) -> None:
    """Raise ValueError if something in the run needs a main model that trains, or a stage with trained parameters."""
    if not is_main_model_frozen(settings):
        return
    refuse_others(settings, "freeze_base_model_for_mtp", "trains only the MTP heads", *_NOT_BESIDE_FROZEN_MAIN_MODEL)
    refuse_deferred_output_layer(settings, "freeze_base_model_for_mtp")
    is_layer_wise = getattr(settings, "use_layer_wise_distributed_optimizer", False)
    is_layer_wise = is_layer_wise or str(getattr(settings, "optimizer", "")).startswith("dist_")
    if is_layer_wise and getattr(settings, "pipeline_model_parallel_size", 1) > 1:
        raise ValueError(
            f"{spell('freeze_base_model_for_mtp')} leaves pipeline stages without a parameter to train, which the "
            f"layer-wise optimizer (dist_muon) cannot gather: use the optimizer muon or adam, or one pipeline stage"
        )


def check_disabled_heads(settings: Any) -> None:
    """Raise ValueError if something in the run needs heads that run."""
    if are_heads_disabled(settings):
        refuse_others(settings, "disable_mtp_loss", "trains without the MTP heads", *_NOT_BESIDE_DISABLED_HEADS)


def check_heads_to_train(settings: Any) -> None:
    """Raise ValueError if nothing trains. Megatron may read `mtp_num_layers` late, from a hybrid model's pattern."""
    if is_main_model_frozen(settings) and not getattr(settings, "mtp_num_layers", None):
        raise ValueError(
            f"{spell('freeze_base_model_for_mtp')} trains only the MTP heads, and the model has none: add "
            f"{spell('mtp_num_layers')}"
        )
