"""When an update is skipped for the size of its gradient norm, and how often that has happened."""

from __future__ import annotations

import logging
import math
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides import metrics

logger = logging.getLogger(__name__)


class Tally:
    """Counts the updates that this process has skipped. One process steps one optimizer tree at a time."""

    def __init__(self) -> None:
        self.total = 0
        self.total_of_mtp = 0
        self.begin_step()

    def begin_step(self) -> None:
        self.last_step_skipped = False
        self.last_step_dropped_mtp = False

    def watches(self, config: Any) -> bool:
        """Whether a threshold is set. Without one nothing is compared, so nothing waits for the GPU."""
        return math.isfinite(_threshold(config)) or math.isfinite(_mtp_threshold(config))

    def skips(self, grad_norm: Any, config: Any) -> bool:
        """Whether `grad_norm` (float or one-element tensor) is too large for an update; if so, count and log it."""
        threshold = _threshold(config)
        if not math.isfinite(threshold):
            return False
        self.last_step_skipped = _is_over(grad_norm, threshold)
        if self.last_step_skipped:
            self.total += 1
            _warn(
                f"update skipped: grad norm {float(grad_norm):.6g} is over --grad-norm-skip-threshold {threshold:g} "
                f"({self.total} skipped so far)"
            )
        metrics.show("updates skipped for grad norm", self.total, "updates-skipped-for-grad-norm")
        return self.last_step_skipped

    def drops_mtp(self, mtp_norm: Any, config: Any) -> bool:
        """Whether the norm of the MTP heads is too large for their part of the update; if so, count and log it."""
        threshold = _mtp_threshold(config)
        if not math.isfinite(threshold):
            return False
        self.last_step_dropped_mtp = _is_over(mtp_norm, threshold)
        if self.last_step_dropped_mtp:
            self.total_of_mtp += 1
            _warn(
                f"MTP heads not updated: their grad norm {float(mtp_norm):.6g} is over "
                f"--mtp-grad-norm-skip-threshold {threshold:g} ({self.total_of_mtp} times so far)"
            )
        metrics.show("mtp updates skipped for grad norm", self.total_of_mtp, "mtp-updates-skipped-for-grad-norm")
        return self.last_step_dropped_mtp


def _threshold(config: Any) -> float:
    return getattr(config, "grad_norm_skip_threshold", math.inf)


def _mtp_threshold(config: Any) -> float:
    own = getattr(config, "mtp_grad_norm_skip_threshold", math.inf)  # no such field: heads are not clipped separately
    return _threshold(config) if own is None else own


def _is_over(norm: Any, threshold: float) -> bool:
    """NaN is too large: it compares as neither larger nor smaller, and must not reach the parameters."""
    return not bool(norm <= threshold)


def _warn(message: str) -> None:
    log_single_rank(logger, logging.WARNING, message)


tally = Tally()
