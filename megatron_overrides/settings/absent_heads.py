"""Name settings of MTP heads that have no effect, because the model has no heads."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.settings.names import spell

logger = logging.getLogger(__name__)

# Settings of heads that verl hands to models without heads or with heads that do not train; their values when off.
_SETTINGS_OF_HEADS = {
    "mtp_loss_type": "cross_entropy",
    "mtp_depth_weights": None,
    "mtp_logits_chunk_size": 0,
    "mtp_detach_heads": False,
    "freeze_base_model_for_mtp": False,
}


def settings_of_heads(settings: Any) -> list[str]:
    """The names of those that are on."""
    return [name for name, off in _SETTINGS_OF_HEADS.items() if getattr(settings, name, off) != off]


def warn_of_absent_heads_in_verl(settings: Any) -> None:
    """Log one line for a model without heads that verl gives settings of heads.

    Its reference model inherits `override_transformer_config` of the actor, and has no heads.
    """
    if getattr(settings, "mtp_num_layers", None) or "verl" not in sys.modules:
        return
    if names := settings_of_heads(settings):
        _log_absent_heads(", ".join(names))


@functools.cache
def _log_absent_heads(names: str) -> None:
    text = (
        f"This model has no MTP heads: settings of verl's override_transformer_config have no effect on it ({names}). "
        f"verl gives its reference model the settings of the actor; an actor has heads with mtp.enable=true and trains "
        f"them with mtp.enable_train=true"
    )
    log_single_rank(logger, logging.WARNING, text)


@functools.cache  # Megatron also asks for the groups of the experts
def warn_of_missing_heads(name: str) -> None:
    """Log that the model has no heads for this setting."""
    text = f"{spell(name)} has no effect: the model has no MTP heads. Add {spell('mtp_num_layers')}"
    log_single_rank(logger, logging.WARNING, text)
