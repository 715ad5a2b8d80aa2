"""QK clipping after an update that did not happen: measure only."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_overrides.core.optimizer.skipped_updates import updates


def clip_after_update(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Wraps clip_qk: train_step calls it after skipped updates too, where it would rescale the weights."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    if updates.in_last_step:
        call.arguments["log_max_only"] = True
    return wrapped(*call.args, **call.kwargs)
