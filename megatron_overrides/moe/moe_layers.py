"""Count the MoE layers that have an auxiliary loss."""

from __future__ import annotations

from typing import Any

from megatron_overrides.mtp.frozen.trained_parts import are_heads_disabled, is_main_model_frozen


def count_moe_layers(run: Any) -> int:
    """How many layers and heads of a run with Megatron's arguments have an auxiliary loss.

    A frozen main model and disabled heads compute none.
    """
    is_frozen = is_main_model_frozen(run)
    heads = 0 if are_heads_disabled(run) else run.mtp_num_layers or 0
    if getattr(run, "mtp_use_repeated_layer", False):
        heads = min(heads, 1)
    if pattern := getattr(run, "hybrid_layer_pattern", None) or getattr(run, "hybrid_override_pattern", None):
        main, *patterns_of_heads = pattern.split("/")
        return main.count("E") * (not is_frozen) + heads * "".join(patterns_of_heads[:1]).count("E")
    frequency = run.moe_layer_freq
    layers = frequency if isinstance(frequency, list) else [i % (frequency or 1) == 0 for i in range(run.num_layers)]
    return sum(layers) * (not is_frozen) + heads * layers[-1]  # a head is like the last layer of the main model
