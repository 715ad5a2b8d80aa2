"""Warn of detached MTP heads that are clipped together with the main model."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from megatron_overrides.settings.checks import spell

logger = logging.getLogger(__name__)


def warn_of_shared_norm(settings: Any) -> None:
    """Log one line if detached heads are clipped together with the main model."""
    if getattr(settings, "mtp_detach_heads", False) and not _clips_heads_separately():
        _warn_of_shared_norm()


def _clips_heads_separately() -> bool:
    """Whether the patch that clips heads separately is applied, or this Megatron does so itself (from 0.19 on)."""
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
