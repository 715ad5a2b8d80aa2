"""Megatron-Bridge: our metrics and a schedule of the MTP loss."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.mtp.loss_weight.current import set_scheduled_weight
from megatron_overrides.mtp.loss_weight.schedule import Progress
from megatron_overrides.report.metrics import logged_run, step_scalars
from megatron_overrides.report.validation_metrics import validate, validation_line, validation_scalars
from megatron_overrides.scoped import scoped


def mark_training_log(call: Call) -> Any:
    """Wraps training_log(..., config, ...): what it prints and asks for is the log of a run with this model."""
    model = call["config"].model
    with scoped(logged_run, lambda: model):
        return call.proceed()


def log_metrics(call: Call) -> Any:
    """Wraps training_log(..., config, global_state, ...), which prints its line with print_rank_last.

    track_mtp_metrics gives the metrics of the heads to TensorBoard itself.
    """
    result = mark_training_log(call)
    state = call["global_state"]
    if state.train_state.step % call["config"].logger.tensorboard_log_interval == 0:
        log_scalars(state, step_scalars())
    return result


def log_scalars(state: Any, scalars: dict[str, float]) -> None:
    """Log numbers by tag for the current step, with each logger that `state`, a GlobalState, has on this rank."""
    if not scalars:
        return
    step = state.train_state.step
    if state.tensorboard_logger:
        for tag, value in scalars.items():
            state.tensorboard_logger.add_scalar(tag, value, step)
    if state.wandb_logger:
        state.wandb_logger.log(scalars, step)
    for logger in (getattr(state, "mlflow_logger", None), getattr(state, "comet_logger", None)):
        if logger:
            logger.log_metrics(scalars, step=step)


def report_heads(call: Call) -> Any:
    """Wraps evaluate_and_print_results(state, prefix, ..., write_to_tensorboard, ...): adds a line and scalars."""
    from megatron.bridge.utils.common_utils import print_rank_last

    result, sets = validate(call)
    for measured in sets:
        print_rank_last(validation_line(call["prefix"], measured))
        if call["write_to_tensorboard"]:
            log_scalars(call["state"], validation_scalars(measured))
    return result


def schedule_weight(call: Call) -> Any:
    """Wraps train_step(..., model, ..., global_state, ...), which runs all microbatches of an iteration."""
    state, train = call["global_state"].train_state, call["global_state"].cfg.train
    progress = Progress.of_run(state.step, state.consumed_train_samples, train.train_iters, train.train_samples)
    set_scheduled_weight(call["model"], progress)
    return call.proceed()
