"""Name settings of MTP heads that have no effect, because the model has no heads, or does not train them."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.mtp.frozen.trained_parts import UNTRAINED_HEADS, are_heads_disabled, is_main_model_frozen
from megatron_overrides.settings.checks import changed_settings, spell

logger = logging.getLogger(__name__)


def changed_head_settings(*configs: Any) -> list[str]:
    """The names of the settings that act on MTP heads alone and differ from their defaults, sorted.

    Args:
        configs: configurations of Megatron.
    """
    return sorted(name for name in changed_settings(*configs) if "mtp" in name)


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


def warn_of_untrained_heads(optimizer_config: Any, model_config: Any) -> None:
    """Log one line that names the settings of MTP heads that act on nothing: heads are missing, or do not train.

    Raises:
        ValueError: the main model is frozen, and verl does not train its heads.
    """
    names = changed_head_settings(optimizer_config, model_config)
    if not getattr(model_config, "mtp_num_layers", None):
        way = "mtp.enable=true and mtp.enable_train=true of verl" if "verl" in sys.modules else spell("mtp_num_layers")
        why = f"the model has no MTP heads. Add {way}"
    elif are_heads_disabled(model_config):
        why = f"{spell('disable_mtp_loss')} leaves the MTP heads untrained"
        names.remove("disable_mtp_loss")
    elif getattr(model_config, UNTRAINED_HEADS, False):
        if is_main_model_frozen(model_config):
            raise ValueError(
                f"{spell('freeze_base_model_for_mtp')} trains only the MTP heads, and verl leaves these as they are: "
                f"set mtp.enable_train=true"
            )
        why = "verl loads the MTP heads and leaves them as they are. Set mtp.enable_train=true"
    else:
        return
    if names:
        _log_untrained_heads(tuple(names), why)


@functools.cache  # Megatron also asks for the groups of the experts
def _log_untrained_heads(names: tuple[str, ...], why: str) -> None:
    verb = "has" if len(names) == 1 else "have"
    text = f"{', '.join(map(spell, names))} {verb} no effect: {why}"
    log_single_rank(logger, logging.WARNING, text)
