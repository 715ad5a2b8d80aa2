"""The metrics that Megatron's training log, TensorBoard and W&B get from the patches."""

from __future__ import annotations

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_overrides.support.metric import Metric
from megatron_overrides.support.step_record import last_record


def training_metrics() -> list[Metric]:
    """Those of the last step of the optimizer that stepped last, then those of the heads that were measured last."""
    tracker = MTPLossLoggingHelper.tracker
    of_heads = (tracker.get(key, ()) for key in ("acceptance_metrics", "length_metrics"))
    return [*last_record().metrics, *(metric for metrics in of_heads for metric in metrics)]
