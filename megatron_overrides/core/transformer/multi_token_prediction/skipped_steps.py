"""The MTP loss in the log line is a mean over the steps that were taken, as the main loss is."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_overrides.support.step_record import last_record


def leave_out_skipped_step(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps MTPLossLoggingHelper.track_mtp_metrics.

    training_log divides by the number of steps taken, but upstream adds the MTP losses of skipped steps as well: the
    printed `mtp_1 loss` of an interval with one step taken of ten would be ten times too large.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    if last_record().decision.skips_update and "total_loss_dict" in call.signature.parameters:
        call.arguments["total_loss_dict"] = None
    return wrapped(*call.args, **call.kwargs)
