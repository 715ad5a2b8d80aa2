"""Report the MTP heads in validation: their losses and accepted lengths, beside Megatron's validation loss."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

from megatron.core.utils import get_model_config
from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer
from megatron.training.utils import print_rank_last

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


def report_heads(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps evaluate_and_print_results(prefix, ..., iteration, ..., write_to_tensorboard): adds a line for each set."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    sets: list[dict[str, float]] = []
    token = _evaluated.set(sets)
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _evaluated.reset(token)
    given = call.arguments
    for number, measured in enumerate(sets):
        suffix = _suffix(number)
        values = "".join(f" {name}: {value:.4f} |" for name, value in measured.items())
        print_rank_last(f" validation{suffix} of the MTP heads at {given['prefix']} |{values}")
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        if not writer or not given["write_to_tensorboard"]:
            continue
        for name, value in measured.items():
            tag = f"{name} validation{suffix}"
            writer.add_scalar(tag, value, given["iteration"])
            if wandb:
                wandb.log({tag: value}, given["iteration"])
    return result


def _suffix(number: int) -> str:
    """What Megatron writes after "validation" for one of several validation sets."""
    settings = get_args()
    if not getattr(settings, "multiple_validation_sets", False):
        return ""
    names = getattr(settings, "validation_set_names", None)
    return f"-{names[number] if names else number}"
