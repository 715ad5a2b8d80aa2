"""Measure the MTP heads in the validation of a trainer, and describe the result in a log line.

Which numbers: `mtp_metrics` in report/metrics.py.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

from megatron_overrides.call import Call
from megatron_overrides.report.metrics import Metric
from megatron_overrides.scoped import scoped

# What is measured of each validation set, while a trainer evaluates them.
evaluated_sets: ContextVar[list[list[Metric]] | None] = ContextVar("evaluated_sets", default=None)


class Validation(NamedTuple):
    """A call that has evaluated validation sets: what it returned, and the numbers of each set."""

    result: Any
    sets: list[list[Metric]]


def validate(call: Call) -> Validation:
    """Call a trainer's function that evaluates validation sets and prints their losses."""
    sets: list[list[Metric]] = []
    with scoped(evaluated_sets, sets):
        return Validation(call.proceed(), sets)


def validation_line(prefix: str, measured: list[Metric], suffix: str = "") -> str:
    """A line in Megatron's form that what reads the numbers of training from a log does not take for one of these."""
    values = "".join(f" {metric.label} value: {metric.value:.6E} |" for metric in measured)
    return f" validation{suffix} of the MTP heads at {prefix} |{values}"


def validation_scalars(measured: list[Metric], suffix: str = "") -> dict[str, float]:
    """The numbers by tag, which is that of training and what Megatron adds to its own: "mtp_1 loss validation"."""
    return {f"{metric.tag} validation{suffix}": metric.value for metric in measured}
