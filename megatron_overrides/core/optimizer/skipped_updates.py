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
        self.last_step_skipped = False

    def begin_step(self) -> None:
        self.last_step_skipped = False

    def watches(self, config: Any) -> bool:
        """Whether a skip threshold is set. Without one nothing is compared, so nothing waits for the GPU."""
        return math.isfinite(getattr(config, "grad_norm_skip_threshold", math.inf))

    def skips(self, grad_norm: Any, config: Any) -> bool:
        """Whether `grad_norm` (float or one-element tensor) is too large; if so, count and log it.

        NaN is too large: it compares as neither larger nor smaller, and must not reach the parameters.
        """
        if not self.watches(config):
            return False
        threshold = config.grad_norm_skip_threshold
        self.last_step_skipped = not bool(grad_norm <= threshold)
        if self.last_step_skipped:
            self.total += 1
            log_single_rank(
                logger,
                logging.WARNING,
                f"update skipped: grad norm {float(grad_norm):.6g} is over --grad-norm-skip-threshold {threshold:g} "
                f"({self.total} skipped so far)",
            )
        metrics.show("updates skipped for grad norm", "updates-skipped-for-grad-norm", self.total)
        return self.last_step_skipped


tally = Tally()
