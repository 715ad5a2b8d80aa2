"""Put our metrics where Megatron's own are: its training log line, TensorBoard and W&B; and count our FLOPs.

Which numbers: support/step_record.py (of a step) and multi_token_prediction/tracker.py (acceptance rates and lengths).
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

from megatron_overrides.support.training_metrics import training_metrics

_is_logging: ContextVar[bool] = ContextVar("training_log is at work", default=False)


def log_metrics(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps training_log, which builds its line in a local variable and prints it with print_rank_last."""
    iteration = inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("iteration")
    token = _is_logging.set(True)
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _is_logging.reset(token)
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if writer and iteration is not None and iteration % get_args().tensorboard_log_interval == 0:
        for metric in training_metrics():
            if metric.tag:
                writer.add_scalar(metric.tag, float(metric.value), iteration)
                if wandb:
                    wandb.log({metric.tag: float(metric.value)}, iteration)
    return result


def append_to_log_line(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps print_rank_last: the one line that training_log prints gets our metrics at its end."""
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    if _is_logging.get():
        call.arguments["message"] += "".join(metric.text for metric in training_metrics())
    return wrapped(*call.args, **call.kwargs)


def count_main_model_logits(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wraps num_floating_point_operations(args, batch_size): the heads are compared with logits that take one matmul.

    It is a forward pass without a backward pass (NVIDIA/Megatron-LM#6473).
    """
    flops = wrapped(*args, **kwargs)
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    settings = given["args"]
    if not settings.mtp_num_layers or settings.mtp_loss_type == "cross_entropy":
        return flops
    tokens = given["batch_size"] * settings.seq_length
    return flops + 2 * tokens * settings.hidden_size * settings.padded_vocab_size
