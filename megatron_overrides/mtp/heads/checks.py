"""Refuse detached MTP heads that cannot work, and warn of those that are clipped together with the main model."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from megatron_overrides.settings.checks import refuse_others, spell

logger = logging.getLogger(__name__)


def check_detached_heads(settings: Any) -> None:
    """Raise ValueError if detached heads cannot work; log one line if they are clipped with the main model."""
    if not getattr(settings, "mtp_detach_heads", False):
        return
    refuse_deferred_output_layer(settings, "mtp_detach_heads")
    if not _clips_heads_separately():
        _warn_of_shared_norm()


def refuse_deferred_output_layer(settings: Any, name: str) -> None:
    """Raise ValueError if the output layer, which `name` uses without training it, defers weight gradients."""
    deferred = ("defer_embedding_wgrad_compute", False, "computes a weight gradient for each of its uses later")
    refuse_others(settings, name, "uses the output layer without training it", deferred)


def _clips_heads_separately() -> bool:
    """True if the patch that clips heads separately is applied, or this Megatron does so itself (from 0.19 on)."""
    optimizer = sys.modules.get("megatron.core.optimizer.optimizer")
    return optimizer is None or hasattr(optimizer, "MTP_GRAD_NORM_GROUP")


@functools.cache
def _warn_of_shared_norm() -> None:
    from megatron.core.utils import log_single_rank

    text = (
        f"{spell('mtp_detach_heads')} keeps the MTP loss out of the main model, but the gradient norm of the MTP heads "
        f"still decides how far the main model is clipped: the patch clip-mtp-grads-separately is not applied"
    )
    log_single_rank(logger, logging.WARNING, text)
