"""Report our metrics of a step beside ms-swift's grad_norm."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.report.training_metrics import training_metrics


def report_metrics(call: Call) -> Any:
    """Wraps BaseMegatronTrainer.on_log(logs, prefix=""): the logs of training get `mtp_grad_norm` and the like.

    What is known of MTP heads reaches ms-swift with their losses, as `mtp_1_acceptance_rate`.
    """
    if not call.get("prefix"):
        for metric in training_metrics(call.instance.optimizer):
            if metric.tag:
                call["logs"][metric.tag.replace("-", "_")] = float(metric.value)
    return call.proceed()
