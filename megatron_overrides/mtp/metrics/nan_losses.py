"""Keep an MTP loss that is NaN in the log line: training_log prints a loss only if it is >= 0 (0.16: > 0)."""

from __future__ import annotations

import math
import re

from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.report.metric import Metric

NAME_OF_LOSS = re.compile(r"mtp_\d+ loss")


def nan_losses() -> list[Metric]:
    """Return the losses of the heads that are NaN in this log interval; those of skipped steps are not in it."""
    sums = mtp.MTPLossLoggingHelper.tracker.get("sums_of_log_interval", {})
    return [Metric(name, math.nan) for name, loss in sums.items() if math.isnan(float(loss))]
