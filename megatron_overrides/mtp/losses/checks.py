"""Refuse losses of MTP heads that cannot be computed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from megatron_overrides.settings.names import spell


def check_losses(settings: Any) -> None:
    """Raise ValueError if the losses of the heads need heads, or weights that do not fit them."""
    loss_type = getattr(settings, "mtp_loss_type", "cross_entropy")
    weights = getattr(settings, "mtp_depth_weights", None)
    depths = getattr(settings, "mtp_num_layers", None)
    if loss_type != "cross_entropy" and not depths and "verl" not in sys.modules:
        raise ValueError(f"{spell('mtp_loss_type')} {loss_type} requires MTP heads: add {spell('mtp_num_layers')}")
    if weights is not None and depths:
        depth_weights(weights, depths)


def check_token_counts(settings: Any) -> None:
    """Raise ValueError if ranks with different numbers of microbatches would add up the tokens of their heads."""
    mtp = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    if not getattr(settings, "hybrid_context_parallel", False) or not getattr(settings, "mtp_num_layers", None):
        return
    if hasattr(mtp, "sum_token_counts"):
        raise ValueError(
            f"{spell('hybrid_context_parallel')} gives ranks different numbers of microbatches, but "
            f"count-mtp-tokens-over-ranks adds up the tokens of each microbatch over all of them: leave the flag out, "
            f"train without {spell('mtp_num_layers')}, or leave out the patch (MEGATRON_MTP_PATCHES="
            f"-count-mtp-tokens-over-ranks; ranks then count by themselves, as upstream's do)"
        )


def depth_weights(weights: str | Sequence[float] | None, depths: int) -> tuple[float, ...]:
    """Return the weight of each depth, divided by the mean of all.

    Args:
        weights: numbers, or a string of them with commas; None for equal weights.

    Raises:
        ValueError: it is not one finite number for each depth, or one is negative, or all are 0.
    """
    if weights is None:
        return (1.0,) * depths
    words = weights.split(",") if isinstance(weights, str) else list(weights)
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) != depths or not all(0 <= number < float("inf") for number in numbers) or not sum(numbers):
        raise ValueError(
            f"{spell('mtp_depth_weights')} {weights}: give one weight for each of the {depths} MTP layers, not "
            f"negative and not all 0, with commas between them"
        )
    mean = sum(numbers) / depths
    return tuple(number / mean for number in numbers)
