"""The trained part of a model: all of it, only its MTP heads, or only its main model."""

from __future__ import annotations

from typing import Any, NamedTuple

# An attribute of a TransformerConfig, which is true where a framework never runs the MTP heads of the model.
UNTRAINED_HEADS = "_mtp_patches_untrained_heads"


def is_main_model_frozen(settings: Any) -> bool:
    """True if only the MTP heads train by `settings`, a TransformerConfig or Megatron's args."""
    return bool(getattr(settings, "freeze_base_model_for_mtp", False))


def are_heads_disabled(settings: Any) -> bool:
    """True if MTP heads stay in the model and do not run by `settings`, a TransformerConfig or Megatron's args."""
    return bool(getattr(settings, "disable_mtp_loss", False))


class TrainedParts(NamedTuple):
    """The parts of a model with an optimizer state in a run; `flag` is the one that leaves something out."""

    trains_main_model: bool
    trains_heads: bool
    flag: str | None

    @classmethod
    def read(cls, settings: Any) -> TrainedParts:
        """Return the parts that train by Megatron's arguments."""
        if is_main_model_frozen(settings):
            return cls(False, True, "--freeze-base-model-for-mtp")
        has_heads = bool(getattr(settings, "mtp_num_layers", None))
        if has_heads and are_heads_disabled(settings):
            return cls(True, False, "--disable-mtp-loss")
        return cls(True, has_heads, None)

    def __str__(self) -> str:
        if self.trains_main_model:
            return "the whole model" if self.trains_heads else "the main model alone"
        return "the MTP heads alone"
