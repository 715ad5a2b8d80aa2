"""Detach MTP heads in mcore-bridge's own MTP layer."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.frameworks.mcore_bridge import add_head_to_project
from megatron_overrides.mtp.heads.detached_heads import (
    TAKES_MAIN_HIDDEN_STATES,
    are_detached,
)


def mark_first_head(call: Call) -> Any:
    """Wraps MultiTokenPredictionLayer.forward(..., layer_number=None): the input of head 1 is of the main model.

    Shared weights make one layer serve as all heads, so the number of the call counts.
    """
    number = call.get("layer_number")
    if are_detached(call.instance.config) and (call.instance.layer_number if number is None else number) == 1:
        setattr(call.instance, TAKES_MAIN_HIDDEN_STATES, True)
    add_head_to_project()
    return call.proceed()
