"""Log the MoE auxiliary losses as their mean over the MoE layers that have one.

NVIDIA/Megatron-LM#6748. A layer of the main model and a head add one loss each; a repeated head adds the mean of its
passes, one loss as well. The trainer's own count takes every head for an MoE layer and every pass for a head, and
counts the heads of a hybrid model twice.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.settings.model_settings import is_main_model_frozen

_is_training_log: ContextVar[bool] = ContextVar("the trainer asks for the log line", default=False)


def count_in_training_log(call: Call) -> Any:
    """Wraps training_log: what it asks to be logged is the mean over the MoE layers of the run."""
    token = _is_training_log.set(True)
    try:
        return call.proceed()
    finally:
        _is_training_log.reset(token)


def average_over_moe_layers(call: Call) -> Any:
    """Wraps track_moe_metrics and MoEMetricsTracker.report: they divide by `num_moe_layers`.

    Where Megatron has no such parameter, it divides by the sum of `moe_layer_freq` where that is a list. Where it has
    one, its own count is right unless the main model is frozen.
    """
    if "num_moe_layers" in call.parameters:
        if _is_training_log.get():
            from megatron.training.global_vars import get_args

            run = get_args()
            if is_main_model_frozen(run):
                call["num_moe_layers"] = count_moe_layers(run)
        return call.proceed()
    moe_layers = call.kwargs.pop("num_moe_layers", None)  # before the arguments are asked by name
    heads = call["mtp_num_layers"] or 0
    if _is_training_log.get():
        from megatron.training.global_vars import get_args

        run = get_args()
        moe_layers = count_moe_layers(run)
        heads = run.mtp_num_layers or 0  # also if the call comes from another of these wrappers
        call["num_layers"] = run.num_layers
    if moe_layers is None:
        return call.proceed()
    call["mtp_num_layers"] = None  # by which it would add layers that have no place in `moe_layer_freq`
    if call.get("num_layers") is not None:
        call["num_layers"] += heads  # a slot for each layer, in which routers put their losses
    call["moe_layer_freq"] = [1] * max(1, moe_layers)  # it divides a sum of zero by 1 where there is none
    return call.proceed()


def average_over_heads(call: Call) -> Any:
    """Wraps the same, for a run whose main model is frozen: only its heads have an auxiliary loss."""
    if _is_training_log.get():
        from megatron.training.global_vars import get_args

        if is_main_model_frozen(get_args()):
            return average_over_moe_layers(call)
    return call.proceed()


def count_moe_layers(run: Any) -> int:
    """How many layers and heads of a run with Megatron's arguments have an auxiliary loss.

    A frozen main model computes none.
    """
    is_frozen = is_main_model_frozen(run)
    heads = run.mtp_num_layers or 0
    if getattr(run, "mtp_use_repeated_layer", False):
        heads = min(heads, 1)
    if pattern := getattr(run, "hybrid_layer_pattern", None) or getattr(run, "hybrid_override_pattern", None):
        main, *patterns_of_heads = pattern.split("/")
        return main.count("E") * (not is_frozen) + heads * "".join(patterns_of_heads[:1]).count("E")
    frequency = run.moe_layer_freq
    layers = frequency if isinstance(frequency, list) else [i % (frequency or 1) == 0 for i in range(run.num_layers)]
    return sum(layers) * (not is_frozen) + heads * layers[-1]  # a head is like the last layer of the main model
