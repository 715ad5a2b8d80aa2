"""The wrappers around Megatron's log of the heads' losses: NaN stays visible, skipped steps do not count."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.call import Call
from megatron_overrides.mtp.metrics.nan_losses import NAME_OF_LOSS
from megatron_overrides.norms.step_record import last_record


def keep_losses(call: Call) -> Any:
    """Wraps MTPLossLoggingHelper.track_mtp_metrics(..., total_loss_dict), which adds the losses of this step to it.

    training_log has replaced them by zeros when it prints its line.
    """
    result = call.proceed()
    sums = call.get("total_loss_dict") or {}
    mtp.MTPLossLoggingHelper.tracker["sums_of_log_interval"] = {
        name: loss for name, loss in sums.items() if NAME_OF_LOSS.fullmatch(name)
    }
    return result


def leave_out_skipped_step(call: Call) -> Any:
    """Wraps MTPLossLoggingHelper.track_mtp_metrics.

    training_log divides by the number of steps taken, but upstream also adds the MTP losses of skipped steps: if one
    step of ten was taken in an interval, the printed `mtp_1 loss` would be ten times too large. A framework that
    reports its dictionary as it is (verl, ms-swift) gives an empty one, and gets what upstream gives it.
    """
    record = last_record()
    if 0 < record.steps == record.skips and call.get("total_loss_dict"):
        call["total_loss_dict"] = None
    record.steps = record.skips = 0
    return call.proceed()
