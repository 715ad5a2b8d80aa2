"""Average the MTP loss of the log line over the steps that were taken, as Megatron does for the main loss."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.norms.step_record import last_record


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
