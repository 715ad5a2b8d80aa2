"""Let verl go on after an update that was skipped."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.norms.step_record import record_of


def return_from_skipped_update(call: Call) -> Any:
    """Wraps MegatronEngine.optimizer_step, which raises NotImplementedError where the optimizer made no update.

    Returns:
        The gradient norm; None if none was measured, because the loss scaler found inf or NaN.
    """
    try:
        return call.proceed()
    except NotImplementedError:
        record = record_of(call.instance.optimizer)
        if not record.decision.skips_update:
            raise
        return None if record.norms is None else record.norms.total[None]
