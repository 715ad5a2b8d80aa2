"""The auxiliary losses of routers are logged as their mean over the MoE layers that have one (NVIDIA/Megatron-LM#6748).

A layer of the main model and a head add one loss each; a repeated head adds the mean of its passes, one loss as well.
The trainer's own count takes every head for an MoE layer and every pass for a head, and counts the heads of a hybrid
model twice.
"""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.mtp.frozen.trained_parts import are_heads_disabled, is_main_model_frozen
from megatron_overrides.report.metrics import logged_run


def mark_routers_of_head(call: Call) -> None:
    """Wraps MultiTokenPredictionLayer.__init__.

    The number of a router is its layer's in the pattern of the head, where that of any other head is the depth. There
    are no more slots than depths.
    """
    call.proceed()
    if getattr(call.instance, "mtp_layer_pattern", None) is None:
        return
    from megatron.core.transformer.moe.router import Router

    for module in call.instance.modules():
        if isinstance(module, Router):
            module.is_mtp_layer = True
            module.layer_number = call.instance.layer_number


def _logged_run() -> Any:
    """Return the settings of the run whose training log is being made.

    None where another caller asks, and where no count of layers describes the model, as in Bridge's MIMO models.
    """
    settings = logged_run.get()
    run = settings and settings()
    return run if hasattr(run, "num_layers") else None


def average_over_moe_layers(call: Call) -> Any:
    """Wraps track_moe_metrics and MoEMetricsTracker.report: they divide by `num_moe_layers`.

    Where Megatron has no such parameter, it divides by the sum of `moe_layer_freq` where that is a list. Where it has
    one, its own count is right unless only a part of the model has losses.
    """
    run = _logged_run()
    if "num_moe_layers" in call.parameters:
        if run is not None and _has_losses_of_a_part(run):
            call["num_moe_layers"] = count_moe_layers(run)
        return call.proceed()
    moe_layers = call.kwargs.pop("num_moe_layers", None)  # before the arguments are asked by name
    heads = call["mtp_num_layers"] or 0
    if run is not None:
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


def average_over_layers_with_losses(call: Call) -> Any:
    """Wraps the same, for a run whose main model is frozen or whose heads are disabled: the others have the losses."""
    run = _logged_run()
    return average_over_moe_layers(call) if run is not None and _has_losses_of_a_part(run) else call.proceed()


def _has_losses_of_a_part(run: Any) -> bool:
    return is_main_model_frozen(run) or are_heads_disabled(run)


def count_moe_layers(run: Any) -> int:
    """Count the layers and heads that have an auxiliary loss in a run with these settings, named as Megatron's.

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
