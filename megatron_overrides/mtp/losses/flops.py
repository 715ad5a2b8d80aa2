"""The tokens and the layers for which Megatron counts floating-point operations."""

from __future__ import annotations

import copy
from typing import Any

from megatron_overrides.call import Call


def tokens_in_batch(call: Call) -> int:
    """Return how many tokens the call of num_floating_point_operations counts; those of packed sequences lack padding.

    Releases before 0.18 also count padding.
    """
    return call.get("total_real_tokens_in_batch") or call["batch_size"] * call["args"].seq_length


def without_heads(settings: Any) -> Any:
    """Return Megatron's arguments for the main model alone."""
    main_model = copy.copy(settings)
    main_model.mtp_num_layers = None
    if pattern := getattr(settings, "hybrid_layer_pattern", None):
        main_model.hybrid_layer_pattern = pattern.partition("/")[0]
    if isinstance(frequency := getattr(settings, "linear_attention_freq", None), list):
        main_model.linear_attention_freq = frequency[: settings.num_layers]
    return main_model
