"""Say which settings of MTP heads act on heads that verl does not train."""

from __future__ import annotations

import logging
from types import SimpleNamespace

from megatron_overrides.call import Call
from megatron_overrides.settings.model_settings import settings_of_heads

logger = logging.getLogger(__name__)


def warn_of_untrained_heads(call: Call) -> None:
    """Wraps check_mtp_config(model_config, engine_config), which verl's engine calls before it builds the model."""
    call.proceed()
    mtp, engine = call["model_config"].mtp, call["engine_config"]
    if not mtp.enable or mtp.enable_train or engine.forward_only:
        return
    if names := settings_of_heads(SimpleNamespace(**engine.override_transformer_config)):
        from megatron.core.utils import log_single_rank

        text = (
            f"{', '.join(names)} of verl's override_transformer_config trains no MTP heads: verl loads the heads and "
            f"leaves them as they are, because mtp.enable_train is false; set it to true"
        )
        log_single_rank(logger, logging.WARNING, text)
