"""The log of ms-swift: our metrics of a step beside its grad_norm, and the model whose losses it averages."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.report.metrics import logged_run, step_scalars
from megatron_overrides.scoped import scoped


def report_metrics(call: Call) -> Any:
    """Wraps BaseMegatronTrainer.on_log(logs, prefix=""): the logs of training get `mtp_grad_norm` and the like.

    The metrics of MTP heads reach ms-swift with their losses, as `mtp_1_acceptance_rate`.
    """
    if not call.get("prefix"):
        for tag, value in step_scalars(call.instance.optimizer).items():
            call["logs"][tag.replace("-", "_")] = value
    return call.proceed()


def mark_training_log(call: Call) -> Any:
    """Wraps BaseMegatronTrainer._log_callback(logs, n_steps): what it asks for is the log of a run with this model."""
    model = call.instance.config
    with scoped(logged_run, lambda: model):
        return call.proceed()
