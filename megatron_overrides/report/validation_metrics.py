"""Measure the MTP heads in the validation of a trainer, and put what was measured into words.

Which numbers: multi_token_prediction/head_metrics.py.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

from megatron.core.utils import get_model_config

from megatron_overrides.call import Call
from megatron_overrides.mtp.mtp_pass import mtp_pass

_evaluated: ContextVar[list[dict[str, float]] | None] = ContextVar("what each evaluation has measured", default=None)


def measure_heads(call: Call) -> Any:
    """Wraps evaluate(..., model, ...), which evaluates one validation set: its forward passes run the heads."""
    model = call["model"]
    chunks = model if isinstance(model, list) else [model]
    config = get_model_config(chunks[0])
    if not getattr(config, "mtp_num_layers", None) or not config.mtp_eval:
        return call.proceed()
    with mtp_pass(compute=True) as metrics:
        result = call.proceed()
    measured = metrics.reduce()
    sets = _evaluated.get()
    if sets is not None:
        sets.append(measured)
    return result


class Validation(NamedTuple):
    """A call that has evaluated validation sets: what it returned, and the numbers of each set."""

    result: Any
    sets: list[dict[str, float]]


def validate(call: Call) -> Validation:
    """Call a trainer's function that evaluates validation sets and prints their losses."""
    sets: list[dict[str, float]] = []
    token = _evaluated.set(sets)
    try:
        return Validation(call.proceed(), sets)
    finally:
        _evaluated.reset(token)


def validation_line(prefix: str, measured: dict[str, float], suffix: str = "") -> str:
    """A line in Megatron's form that what reads the numbers of training from a log does not take for one of these."""
    values = "".join(f" {name} value: {value:.6E} |" for name, value in measured.items())
    return f" validation{suffix} of the MTP heads at {prefix} |{values}"
