"""What trains: all of a model, only its MTP heads, or only its main model; and what cannot work then."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_overrides.settings.checks import spell


def is_main_model_frozen(settings: Any) -> bool:
    """Whether only the MTP heads train by `settings`, a TransformerConfig or Megatron's args."""
    return bool(getattr(settings, "freeze_base_model_for_mtp", False))


def are_heads_disabled(settings: Any) -> bool:
    """Whether MTP heads stay in the model and do not run by `settings`, a TransformerConfig or Megatron's args."""
    return bool(getattr(settings, "disable_mtp_loss", False))


class TrainedParts(NamedTuple):
    """What has an optimizer state in a run; `flag` is the one that leaves something out."""

    main_model: bool
    heads: bool
    flag: str | None

    @classmethod
    def read(cls, settings: Any) -> TrainedParts:
        """What trains by Megatron's arguments."""
        if is_main_model_frozen(settings):
            return cls(False, True, "--freeze-base-model-for-mtp")
        has_heads = bool(getattr(settings, "mtp_num_layers", None))
        if has_heads and are_heads_disabled(settings):
            return cls(True, False, "--disable-mtp-loss")
        return cls(True, has_heads, None)

    def __str__(self) -> str:
        if self.main_model:
            return "the whole model" if self.heads else "the main model alone"
        return "the MTP heads alone"


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
