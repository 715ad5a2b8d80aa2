"""Detach MTP heads in mcore-bridge's own MTP layer."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_overrides.core.transformer.multi_token_prediction.detached_heads import (
    TAKES_MAIN_HIDDEN_STATES,
    are_detached,
)
from megatron_overrides.mcore_bridge.model.gpt_model import add_head_to_project


def mark_first_head(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps MultiTokenPredictionLayer.forward(..., layer_number=None): the input of head 1 is of the main model.

    Shared weights make one layer serve as all heads, so the number of the call counts.
    """
    number = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("layer_number")
    if are_detached(instance.config) and (instance.layer_number if number is None else number) == 1:
        setattr(instance, TAKES_MAIN_HIDDEN_STATES, True)
    add_head_to_project()
    return wrapped(*args, **kwargs)
