"""Megatron's count of floating-point operations, for runs with MTP heads."""

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


def count_main_model_logits(call: Call) -> Any:
    """Wraps num_floating_point_operations(args, batch_size, ...): the heads are compared with logits of one matmul.

    It is a forward pass without a backward pass (NVIDIA/Megatron-LM#6473).
    """
    flops = call.proceed()
    settings = call["args"]
    # Arguments that another parser has made lack the added settings.
    loss_type = getattr(settings, "mtp_loss_type", "cross_entropy")
    if not getattr(settings, "mtp_num_layers", None) or loss_type == "cross_entropy":
        return flops
    return flops + 2 * tokens_in_batch(call) * settings.hidden_size * settings.padded_vocab_size
