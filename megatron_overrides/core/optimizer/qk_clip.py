"""After a skipped update QK clipping only measures."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_overrides.support.step_record import last_record


def clip_after_update(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Wraps clip_qk: train_step calls it after skipped updates too, where it would rescale the weights."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    if last_record().decision.skips_update:
        call.arguments["log_max_only"] = True
    return wrapped(*call.args, **call.kwargs)
