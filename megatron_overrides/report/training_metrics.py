"""The metrics of the patches, and how they get into the line that a training log prints.

Which numbers: norms/step_record.py (of a step) and mtp/metrics/tracker.py (of the heads).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_overrides.norms.optimizer_tree import check_optimizer
from megatron_overrides.norms.step_record import last_record, record_of
from megatron_overrides.report.metric import Metric

is_logging: ContextVar[bool] = ContextVar("a training log is at work", default=False)


def training_metrics(optimizer: Any = None) -> list[Metric]:
    """Those of the last step of `optimizer`, then those of the heads that were measured last.

    Args:
        optimizer: as get_megatron_optimizer returned it; None for the one that stepped last in this process.

    Raises:
        TypeError: `optimizer` is no optimizer of Megatron.
    """
    if optimizer is not None:
        check_optimizer(optimizer)
    record = last_record() if optimizer is None else record_of(optimizer)
    tracker = MTPLossLoggingHelper.tracker
    of_heads = (tracker.get(key, ()) for key in ("acceptance_metrics", "length_metrics"))
    return [*record.metrics, *(metric for metrics in of_heads for metric in metrics)]


@contextmanager
def in_training_log() -> Iterator[None]:
    """While the training log of Megatron or a framework runs, `append_to_log_line` adds to what it prints."""
    token = is_logging.set(True)
    try:
        yield
    finally:
        is_logging.reset(token)
