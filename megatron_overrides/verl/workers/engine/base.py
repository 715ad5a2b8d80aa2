"""Report our metrics of a step beside verl's grad_norm."""

from __future__ import annotations

from typing import Any


def report_metrics(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps BaseEngine.train_batch(data, loss_function): `metrics` gets `megatron/mtp_grad_norm` and the like.

    What is known of MTP heads reaches verl with their losses, as `mtp_losses/mtp_1_acceptance_rate`. Engines of other
    backends are left alone.
    """
    outputs = wrapped(*args, **kwargs)
    optimizer = getattr(instance, "optimizer", None)
    if hasattr(optimizer, "get_grad_norm") and instance.is_mp_src_rank_with_outputs():
        from megatron_overrides.support.training_metrics import training_metrics  # imports Megatron

        for metric in training_metrics(optimizer):
            if metric.tag:
                outputs["metrics"][f"megatron/{metric.tag.replace('-', '_')}"] = float(metric.value)
    return outputs
