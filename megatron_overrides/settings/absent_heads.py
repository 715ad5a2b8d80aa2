"""Name settings of MTP heads that have no effect, because the model has no heads."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.settings.checks import declared_settings, spell

logger = logging.getLogger(__name__)


def changed_head_settings(settings: Any) -> list[str]:
    """The names of the settings of heads that differ from their defaults: the fields added to TransformerConfig."""
    from megatron.core.transformer import TransformerConfig

    declared = declared_settings(TransformerConfig)
    return sorted(one.name for one in declared if getattr(settings, one.name, one.default) != one.default)


def warn_of_absent_heads_in_verl(settings: Any) -> None:
    """Log one line for a model without heads that verl gives settings of heads.

    Its reference model inherits `override_transformer_config` of the actor, and has no heads.
    """
    if getattr(settings, "mtp_num_layers", None) or "verl" not in sys.modules:
        return
    if names := changed_head_settings(settings):
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
def warn_of_missing_heads(name: str, are_disabled: bool = False) -> None:
    """Log that the model has no heads for this setting, or that they do not train."""
    why = f"the model has no MTP heads. Add {spell('mtp_num_layers')}"
    if are_disabled:
        why = f"{spell('disable_mtp_loss')} leaves the MTP heads untrained"
    log_single_rank(logger, logging.WARNING, f"{spell(name)} has no effect: {why}")
