"""Put our metrics where Megatron-Bridge's own are: its log line, TensorBoard, W&B, MLflow and Comet."""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call
from megatron_overrides.report.training_metrics import in_training_log, training_metrics


def log_metrics(call: Call) -> Any:
    """Wraps training_log(..., config, global_state, ...), which prints its line with print_rank_last.

    What track_mtp_metrics gives to TensorBoard has no tag, so nothing is logged twice.
    """
    with in_training_log():
        result = call.proceed()
    state = call["global_state"]
    if state.train_state.step % call["config"].logger.tensorboard_log_interval == 0:
        log_scalars(state, {metric.tag: float(metric.value) for metric in training_metrics() if metric.tag})
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
