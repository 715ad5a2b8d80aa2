"""The wrappers that put our metrics into Megatron's log lines of training and validation, TensorBoard and W&B."""

from __future__ import annotations

from typing import Any

from megatron.core.utils import get_model_config

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.mtp.forward_pass import mtp_pass
from megatron_overrides.report.metrics import end_of_log_line, logged_run, step_scalars
from megatron_overrides.report.validation_metrics import (
    evaluated_sets,
    validate,
    validation_line,
    validation_scalars,
)
from megatron_overrides.scoped import scoped


def append_to_log_line(call: Call) -> Any:
    """Wraps print_rank_last: the one line that a training log prints gets our metrics at its end."""
    if logged_run.get():
        call["message"] += end_of_log_line()
    return call.proceed()


def measure_heads(call: Call) -> Any:
    """Wraps evaluate(..., model, ...), which evaluates one validation set: its forward passes run the heads.

    Without mtp-acceptance-length, which adds `mtp_eval`, they do not.
    """
    config = get_model_config(as_list(call["model"])[0])
    if not getattr(config, "mtp_num_layers", None) or not getattr(config, "mtp_eval", False):
        return call.proceed()
    with mtp_pass(compute=True) as metrics:
        result = call.proceed()
    measured = metrics.reduce_metrics()
    sets = evaluated_sets.get()
    if sets is not None:
        sets.append(measured)
    return result


def mark_training_log(call: Call) -> Any:
    """Wraps training_log: what it prints and asks for is the log of a run of Megatron's trainer."""
    with scoped(logged_run, _arguments):
        return call.proceed()


def _arguments() -> Any:
    from megatron.training.global_vars import get_args

    return get_args()


def log_metrics(call: Call) -> Any:
    """Wraps training_log, which builds its line in a local variable and prints it with print_rank_last."""
    iteration = call.get("iteration")
    result = mark_training_log(call)
    from megatron.training import global_vars  # not in every wheel, and Megatron-Bridge goes without

    writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if writer and iteration is not None and iteration % global_vars.get_args().tensorboard_log_interval == 0:
        for tag, value in step_scalars().items():
            writer.add_scalar(tag, value, iteration)
            if wandb:
                wandb.log({tag: value}, iteration)
    return result


def report_heads(call: Call) -> Any:
    """Wraps evaluate_and_print_results(prefix, ..., iteration, ..., write_to_tensorboard): adds a line for each set."""
    from megatron.training import global_vars, utils

    result, sets = validate(call)
    for number, measured in enumerate(sets):
        suffix = _suffix(number, global_vars.get_args())
        utils.print_rank_last(validation_line(call["prefix"], measured, suffix))
        writer, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
        if not writer or not call["write_to_tensorboard"]:
            continue
        for tag, value in validation_scalars(measured, suffix).items():
            writer.add_scalar(tag, value, call["iteration"])
            if wandb:
                wandb.log({tag: value}, call["iteration"])
    return result


def _suffix(number: int, settings: Any) -> str:
    """Return the words that Megatron writes after "validation" for one of several validation sets."""
    if not getattr(settings, "multiple_validation_sets", False):
        return ""
    names = getattr(settings, "validation_set_names", None)
    return f"-{names[number] if names else number}"
