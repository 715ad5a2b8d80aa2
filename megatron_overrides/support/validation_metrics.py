"""Measure the MTP heads in the validation of a trainer, and put what was measured into words.

Which numbers: multi_token_prediction/head_metrics.py.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any, NamedTuple

from megatron.core.utils import get_model_config

from megatron_overrides.core.transformer.multi_token_prediction.mtp_pass import mtp_pass

_evaluated: ContextVar[list[dict[str, float]] | None] = ContextVar("what each evaluation has measured", default=None)


def measure_heads(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps evaluate(..., model, ...), which evaluates one validation set: its forward passes run the heads."""
    model = inspect.signature(wrapped).bind(*args, **kwargs).arguments["model"]
    chunks = model if isinstance(model, list) else [model]
    config = get_model_config(chunks[0])
    if not getattr(config, "mtp_num_layers", None) or not config.mtp_eval:
        return wrapped(*args, **kwargs)
    with mtp_pass(compute=True) as metrics:
        result = wrapped(*args, **kwargs)
    measured = metrics.reduce()
    sets = _evaluated.get()
    if sets is not None:
        sets.append(measured)
    return result


class Validation(NamedTuple):
    """A call that has evaluated validation sets: its arguments, what it returned, and the numbers of each set."""

    arguments: dict[str, Any]
    result: Any
    sets: list[dict[str, float]]


def validate(evaluate_and_print: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Validation:
    """Call a trainer's function that evaluates validation sets and prints their losses."""
    call = inspect.signature(evaluate_and_print).bind(*args, **kwargs)
    call.apply_defaults()
    sets: list[dict[str, float]] = []
    token = _evaluated.set(sets)
    try:
        return Validation(call.arguments, evaluate_and_print(*args, **kwargs), sets)
    finally:
        _evaluated.reset(token)


def validation_line(prefix: str, measured: dict[str, float], suffix: str = "") -> str:
    """A line in Megatron's form that what reads the numbers of training from a log does not take for one of these."""
    values = "".join(f" {name} value: {value:.6E} |" for name, value in measured.items())
    return f" validation{suffix} of the MTP heads at {prefix} |{values}"
