"""Keep an MTP loss that is NaN in the log line: training_log prints a loss only if it is >= 0 (0.16: > 0)."""

from __future__ import annotations

import math
import re
from typing import Any

from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.call import Call
from megatron_overrides.report.metric import Metric

_NAME = re.compile(r"mtp_\d+ loss")


def keep_losses(call: Call) -> Any:
    """Wraps MTPLossLoggingHelper.track_mtp_metrics(..., total_loss_dict), which adds the losses of this step to it.

    training_log has replaced them by zeros when it prints its line.
    """
    result = call.proceed()
    sums = call.get("total_loss_dict") or {}
    mtp.MTPLossLoggingHelper.tracker["sums_of_log_interval"] = {
        name: loss for name, loss in sums.items() if _NAME.fullmatch(name)
    }
    return result


def nan_losses() -> list[Metric]:
    """Return the losses of the heads that are NaN in this log interval; those of skipped steps are not in it."""
    sums = mtp.MTPLossLoggingHelper.tracker.get("sums_of_log_interval", {})
    return [Metric(name, math.nan) for name, loss in sums.items() if math.isnan(float(loss))]
