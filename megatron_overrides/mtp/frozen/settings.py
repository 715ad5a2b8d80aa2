"""Whether only the MTP heads train, and what cannot work then."""

from __future__ import annotations

from typing import Any

from megatron_overrides.settings.names import spell


def is_main_model_frozen(settings: Any) -> bool:
    """Whether only the MTP heads train by `settings`, a TransformerConfig or Megatron's args."""
    return bool(getattr(settings, "freeze_base_model_for_mtp", False))


def check_frozen_main_model(settings: Any) -> None:
    """Raise ValueError if a pipeline stage without a parameter to train cannot be gathered."""
    if not is_main_model_frozen(settings):
        return
    is_layer_wise = getattr(settings, "use_layer_wise_distributed_optimizer", False)
    is_layer_wise = is_layer_wise or str(getattr(settings, "optimizer", "")).startswith("dist_")
    if is_layer_wise and getattr(settings, "pipeline_model_parallel_size", 1) > 1:
        raise ValueError(
            f"{spell('freeze_base_model_for_mtp')} leaves pipeline stages without a parameter to train, which the "
            f"layer-wise optimizer (dist_muon) cannot gather: use the optimizer muon or adam, or one pipeline stage"
        )


def check_heads_to_train(settings: Any) -> None:
    """Raise ValueError if nothing trains. Megatron may read `mtp_num_layers` late, from a hybrid model's pattern."""
    if is_main_model_frozen(settings) and not getattr(settings, "mtp_num_layers", None):
        raise ValueError(
            f"{spell('freeze_base_model_for_mtp')} trains only the MTP heads, and the model has none: add "
            f"{spell('mtp_num_layers')}"
        )
