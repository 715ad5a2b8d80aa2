"""The tokens for which Megatron counts floating-point operations."""

from __future__ import annotations

from megatron_overrides.call import Call


def tokens_in_batch(call: Call) -> int:
    """Return how many tokens the call of num_floating_point_operations counts; those of packed sequences lack padding.

    Releases before 0.18 count padding, too.
    """
    return call.get("total_real_tokens_in_batch") or call["batch_size"] * call["args"].seq_length
