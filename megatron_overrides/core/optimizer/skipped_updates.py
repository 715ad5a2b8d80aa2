"""When an update is skipped for the size of its gradient norm, and how often that has happened."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides import metrics

logger = logging.getLogger(__name__)


class Tally:
    """What a norm over its threshold has kept from being updated. A process steps one optimizer tree at a time.

    `read(config)` is the threshold. `warning` has the fields norm, flag, threshold and total.
    """

    def __init__(self, flag: str, read: Callable[[Any], float], warning: str, label: str) -> None:
        self.flag = flag
        self.read = read
        self.warning = warning
        self.label = label
        self.total = 0
        self.in_last_step = False

    def watches(self, config: Any) -> bool:
        """Whether a threshold is set. Without one nothing is compared, so nothing waits for the GPU."""
        return math.isfinite(self.read(config))

    def skips(self, norm: Any, whole: Any, config: Any) -> bool:
        """Whether this step's norm is too large for an update; if so, count and log it.

        `norm` (float or one-element tensor) leaves out what is exempt from clipping, `whole` does not: exempt
        gradients may have any size, but have to be numbers (and their norm a float32: it is inf over 1.8e19).
        """
        if not self.watches(config):
            return False
        threshold = self.read(config)
        norm = norm if math.isfinite(whole) else whole
        self.in_last_step = not bool(norm <= threshold)  # NaN is neither larger nor smaller, and must not pass
        if self.in_last_step:
            self.total += 1
            warning = self.warning.format(
                norm=f"{float(norm):.6g}", flag=self.flag, threshold=f"{threshold:g}", total=self.total
            )
            log_single_rank(logger, logging.WARNING, warning)
        metrics.show(self.label, self.total, self.label.replace(" ", "-"))
        return self.in_last_step


def _threshold(config: Any) -> float:
    return getattr(config, "grad_norm_skip_threshold", math.inf)


def _threshold_of_heads(config: Any) -> float:
    own = getattr(config, "mtp_grad_norm_skip_threshold", math.inf)  # no such field: heads are not clipped separately
    return _threshold(config) if own is None else own


updates = Tally(
    flag="--grad-norm-skip-threshold",
    read=_threshold,
    warning="update skipped: grad norm {norm} is over {flag} {threshold} ({total} skipped so far)",
    label="updates skipped for grad norm",
)
updates_of_heads = Tally(
    flag="--mtp-grad-norm-skip-threshold",
    read=_threshold_of_heads,
    warning="MTP heads not updated: their grad norm {norm} is over {flag} {threshold} ({total} times so far)",
    label="mtp updates skipped for grad norm",
)


def begin_step() -> None:
    """Forget the decisions of the step before."""
    for tally in (updates, updates_of_heads):
        tally.in_last_step = False
