"""After a skipped update QK clipping only measures."""

from __future__ import annotations

from megatron_overrides.call import Call
from megatron_overrides.norms.step_record import last_record


def clip_after_update(call: Call) -> float:
    """Wraps clip_qk: train_step calls it after skipped updates too, where it would rescale the weights."""
    if last_record().decision.skips_update:
        call["log_max_only"] = True
    return call.proceed()
