"""Report our metrics of a step beside ms-swift's grad_norm."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.report.metrics import step_scalars


def report_metrics(call: Call) -> Any:
    """Wraps BaseMegatronTrainer.on_log(logs, prefix=""): the logs of training get `mtp_grad_norm` and the like.

    The metrics of MTP heads reach ms-swift with their losses, as `mtp_1_acceptance_rate`.
    """
    if not call.get("prefix"):
        for tag, value in step_scalars(call.instance.optimizer).items():
            call["logs"][tag.replace("-", "_")] = value
    return call.proceed()
