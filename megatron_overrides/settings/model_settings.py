"""Refuse settings of MTP heads that cannot work together."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from typing import Any

from megatron_overrides.settings.names import check_counts, check_switches, spell

logger = logging.getLogger(__name__)

LOSS_TYPES = ("cross_entropy", "kl", "tv", "e2e_tv")
SWITCHES = ("mtp_detach_heads", "separate_mtp_grad_clip", "freeze_base_model_for_mtp", "mtp_eval")
INTERVALS = {name: "steps, or 0 for none" for name in ("mtp_acceptance_interval", "mtp_acceptance_length_interval")}


def check_heads(settings: Any) -> None:
    """Raise ValueError if `settings` (a TransformerConfig or Megatron's args) ask of MTP heads what cannot work."""
    check_switches(settings, SWITCHES)
    check_counts(settings, INTERVALS)
    graphs = [str(getattr(settings, f"cuda_graph_{kind}", "")) for kind in ("impl", "scope", "modules")]
    # Every step can be captured where it measures the same; label agreement does with interval 1.
    for name, first in (("mtp_acceptance_interval", 2), ("mtp_acceptance_length_interval", 1)):
        interval = getattr(settings, name, 0)
        if interval >= first and any("full_iteration" in graph for graph in graphs):
            possible = "0" if first == 1 else "1 or 0"
            raise ValueError(
                f"{spell(name)} decides in each step whether to measure, but a CUDA graph of the whole iteration "
                f"repeats the step that it was captured in: set the interval to {possible}"
            )
    check_losses(settings)
    _warn_of_absent_heads_in_verl(settings)
    check_token_counts(settings)
    check_frozen_main_model(settings)
    if getattr(settings, "mtp_detach_heads", False) and not _clips_heads_separately():
        _warn_of_shared_norm()
    for name in ("mtp_detach_heads", "freeze_base_model_for_mtp"):
        if getattr(settings, name, False) and getattr(settings, "defer_embedding_wgrad_compute", False):
            raise ValueError(
                f"{spell(name)} uses the output layer without training it, but "
                f"{spell('defer_embedding_wgrad_compute')} computes a weight gradient for each of its uses later: "
                f"leave one of the two out"
            )


def _clips_heads_separately() -> bool:
    """Whether the patch that clips heads separately is applied, or this Megatron does so itself (from 0.19 on)."""
    optimizer = sys.modules.get("megatron.core.optimizer.optimizer")
    return optimizer is None or hasattr(optimizer, "MTP_GRAD_NORM_GROUP")


@functools.cache
def _warn_of_shared_norm() -> None:
    from megatron.core.utils import log_single_rank

    text = (
        f"{spell('mtp_detach_heads')} keeps the MTP loss out of the main model, but the gradient norm of the MTP heads "
        f"still decides how far the main model is clipped: the patch clip-mtp-grads-separately is not applied"
    )
    log_single_rank(logger, logging.WARNING, text)


# Settings of heads that verl hands to models without heads or with heads that do not train; their values when off.
_SETTINGS_OF_HEADS = {
    "mtp_loss_type": "cross_entropy",
    "mtp_depth_weights": None,
    "mtp_logits_chunk_size": 0,
    "mtp_detach_heads": False,
    "freeze_base_model_for_mtp": False,
}


def settings_of_heads(settings: Any) -> list[str]:
    """The names of those that are on."""
    return [name for name, off in _SETTINGS_OF_HEADS.items() if getattr(settings, name, off) != off]


def _warn_of_absent_heads_in_verl(settings: Any) -> None:
    """Log one line for a model without heads that verl gives settings of heads.

    Its reference model inherits `override_transformer_config` of the actor, and has no heads.
    """
    if getattr(settings, "mtp_num_layers", None) or "verl" not in sys.modules:
        return
    if names := settings_of_heads(settings):
        _log_absent_heads(", ".join(names))


@functools.cache
def _log_absent_heads(names: str) -> None:
    from megatron.core.utils import log_single_rank

    text = (
        f"This model has no MTP heads: settings of verl's override_transformer_config have no effect on it ({names}). "
        f"verl gives its reference model the settings of the actor; an actor has heads with mtp.enable=true and trains "
        f"them with mtp.enable_train=true"
    )
    log_single_rank(logger, logging.WARNING, text)


# What cannot work while only the MTP heads train: setting, its value when off, and why.
_NOT_WITH_FROZEN_MAIN_MODEL = (
    ("freeze_base_for_mtp", False, "freezes the main model in a second way, that of megatron.post_training"),
    ("qad_train_target", None, "chooses in a second way what trains"),
    ("freeze_all_layers", False, "freezes the heads, too"),
    ("overlap_moe_expert_parallel_comm", False, "schedules the backward pass of layers that have none"),
    ("cuda_graph_impl", "none", "captures a backward pass of layers that have none"),
    ("qk_clip", False, "scales the weights of the main model"),
    ("cpu_offloading", False, "offloads activations that the main model does not keep"),
    ("fine_grained_activation_offloading", False, "offloads activations that the main model does not keep"),
    ("moe_paged_stash", False, "keeps activations for a backward pass that the main model has not"),
)


def is_main_model_frozen(settings: Any) -> bool:
    """Whether only the MTP heads train, as `settings` (a TransformerConfig or Megatron's args) say."""
    return bool(getattr(settings, "freeze_base_model_for_mtp", False))


def check_frozen_main_model(settings: Any, is_complete: bool = False) -> None:
    """Raise ValueError if `freeze_base_model_for_mtp` asks for what cannot work.

    Args:
        is_complete: nothing more sets `mtp_num_layers`, which Megatron may read from the pattern of a hybrid model.
    """
    if not is_main_model_frozen(settings):
        return
    for name, off, effect in _NOT_WITH_FROZEN_MAIN_MODEL:
        if getattr(settings, name, off) not in (off, None):
            raise ValueError(
                f"{spell('freeze_base_model_for_mtp')} trains only the MTP heads, but {spell(name)} {effect}: leave "
                f"one of the two out"
            )
    is_layer_wise = getattr(settings, "use_layer_wise_distributed_optimizer", False)
    is_layer_wise = is_layer_wise or str(getattr(settings, "optimizer", "")).startswith("dist_")
    if is_layer_wise and getattr(settings, "pipeline_model_parallel_size", 1) > 1:
        raise ValueError(
            f"{spell('freeze_base_model_for_mtp')} leaves pipeline stages without a parameter to train, which the "
            f"layer-wise optimizer (dist_muon) cannot gather: use the optimizer muon or adam, or one pipeline stage"
        )
    if is_complete and not getattr(settings, "mtp_num_layers", None):
        raise ValueError(
            f"{spell('freeze_base_model_for_mtp')} trains only the MTP heads, and the model has none: add "
            f"{spell('mtp_num_layers')}"
        )


def check_losses(settings: Any) -> None:
    """Raise ValueError if the losses of the heads cannot be computed as `settings` say."""
    loss_type = getattr(settings, "mtp_loss_type", "cross_entropy")
    chunk_size = getattr(settings, "mtp_logits_chunk_size", 0)
    weights = getattr(settings, "mtp_depth_weights", None)
    depths = getattr(settings, "mtp_num_layers", None)
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"{spell('mtp_loss_type')} must be one of {', '.join(LOSS_TYPES)}, not {loss_type!r}")
    if loss_type != "cross_entropy" and not depths and "verl" not in sys.modules:
        raise ValueError(f"{spell('mtp_loss_type')} {loss_type} requires MTP heads: add {spell('mtp_num_layers')}")
    check_counts(settings, {"mtp_logits_chunk_size": "rows, or 0 for all at once"})
    if weights is not None and depths:
        depth_weights(weights, depths)
    if (loss_type != "cross_entropy" or chunk_size) and getattr(settings, "defer_embedding_wgrad_compute", False):
        raise ValueError(
            f"{spell('mtp_loss_type')} and {spell('mtp_logits_chunk_size')} call the output layer chunk by chunk, but "
            f"{spell('defer_embedding_wgrad_compute')} keeps the input of each of its calls for later: leave it out"
        )


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
