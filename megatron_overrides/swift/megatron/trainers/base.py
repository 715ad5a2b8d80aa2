"""Report our metrics of a step beside ms-swift's grad_norm."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_overrides.support.training_metrics import training_metrics


def report_metrics(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps BaseMegatronTrainer.on_log(logs, prefix=""): the logs of training get `mtp_grad_norm` and the like.

    What is known of MTP heads reaches ms-swift with their losses, as `mtp_1_acceptance_rate`.
    """
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    if not given.get("prefix"):
        for metric in training_metrics(instance.optimizer):
            if metric.tag:
                given["logs"][metric.tag.replace("-", "_")] = float(metric.value)
    return wrapped(*args, **kwargs)
