"""Report our metrics of a step beside verl's grad_norm."""

from __future__ import annotations

from typing import Any

from verl.utils import tensordict_utils

from megatron_overrides.call import Call


def report_metrics(call: Call) -> Any:
    """Wraps TrainingWorker._postprocess_output(output): `metrics` gets `megatron/mtp_grad_norm` and the like.

    It gathers the metrics of all data-parallel ranks in lists, which verl's loops chain or reduce, but leaves
    `grad_norm`, which is the same on all ranks, a number. Ours are numbers, too, and are added to its result. What is
    known of MTP heads reaches verl with their losses, as `mtp_losses/mtp_1_acceptance_rate`. Passes that have updated
    nothing and engines of other backends are left alone.
    """
    output = call["output"]
    optimizer = getattr(call.instance.engine, "optimizer", None)
    if "grad_norm" not in output["metrics"] or not hasattr(optimizer, "get_grad_norm"):
        return call.proceed()
    result = call.proceed()
    from megatron_overrides.report.training_metrics import training_metrics  # imports Megatron

    tensordict_utils.get(result, "metrics").update(
        {
            f"megatron/{metric.tag.replace('-', '_')}": float(metric.value)
            for metric in training_metrics(optimizer)
            if metric.tag
        }
    )
    return result
