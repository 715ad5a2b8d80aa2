"""The wrappers around Megatron's log of the heads' losses: NaN stays visible, skipped steps do not count."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import multi_token_prediction as mtp

from megatron_overrides.call import Call
from megatron_overrides.norms.step_state import last_step_state
from megatron_overrides.report.metrics import MTP_LOSS


def keep_losses(call: Call) -> Any:
    """Wraps MTPLossLoggingHelper.track_mtp_metrics(..., total_loss_dict), which adds the losses of this step to it.

    training_log has replaced them by zeros when it prints its line.
    """
    result = call.proceed()
    sums = call.get("total_loss_dict") or {}
    losses = [loss for name, loss in sums.items() if MTP_LOSS.fullmatch(name)]
    mtp.MTPLossLoggingHelper.tracker["losses_of_log_interval"] = losses
    return result


def leave_out_skipped_step(call: Call) -> Any:
    """Wraps MTPLossLoggingHelper.track_mtp_metrics.

    training_log divides by the number of steps taken, but upstream also adds the MTP losses of skipped steps: if one
    step of ten was taken in an interval, the printed `mtp_1 loss` would be ten times too large. A framework that
    reports its dictionary as it is (verl, ms-swift) gives an empty one, and gets what upstream gives it.
    """
    state = last_step_state()
    if 0 < state.steps == state.skips and call.get("total_loss_dict"):
        call["total_loss_dict"] = None
    state.steps = state.skips = 0
    return call.proceed()
