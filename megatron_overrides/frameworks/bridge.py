"""Megatron-Bridge: our metrics, a schedule of the MTP loss, and MTP heads that a Hugging Face checkpoint lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.utils import get_model_config, unwrap_model

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.model_ranks import is_on_any_rank
from megatron_overrides.mtp.heads.finite_heads import listed, parameters_of_heads
from megatron_overrides.mtp.loss_weight.current import set_scheduled_weight
from megatron_overrides.mtp.loss_weight.schedule import Progress
from megatron_overrides.report.metrics import MEGATRON_BRIDGE, logging_trainer, step_scalars
from megatron_overrides.report.validation_metrics import validate, validation_line
from megatron_overrides.scoped import scoped


def log_metrics(call: Call) -> Any:
    """Wraps training_log(..., config, global_state, ...), which prints its line with print_rank_last.

    track_mtp_metrics gives the metrics of the heads to TensorBoard itself.
    """
    with scoped(logging_trainer, MEGATRON_BRIDGE):
        result = call.proceed()
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
            log_scalars(call["state"], {f"{name} validation": value for name, value in measured.items()})
    return result


def schedule_weight(call: Call) -> Any:
    """Wraps train_step(..., model, ..., global_state, ...), which runs all microbatches of an iteration."""
    state, train = call["global_state"].train_state, call["global_state"].cfg.train
    progress = Progress.of_run(state.step, state.consumed_train_samples, train.train_iters, train.train_samples)
    set_scheduled_weight(call["model"], progress)
    return call.proceed()


def _uninitialized_heads(bridge: Any, source: Any, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Return the names of the parameters of heads that nothing has written to, and for which `source` has no weight."""
    untouched = [(name, param) for name, param in parameters_of_heads(chunks) if param._version == 0]
    if not untouched:
        return []
    filled = {id(task.param_weight) for task in bridge.build_conversion_tasks(source, chunks) if task is not None}
    return [name for name, param in untouched if id(param) not in filled]


def refuse_uninitialized_heads(call: Call) -> Any:
    """Wraps load_weights_hf_to_megatron(hf_pretrained, megatron_model, ...) of a MegatronModelBridge.

    It may be memory of any values, so it is not enough to look at them. A Megatron checkpoint that is loaded later may
    have the heads; a run that resumes from one costs `perform_initialization=True` nothing but time.

    Raises:
        ValueError: on all ranks of the model, if there is such a head.
    """
    result = call.proceed()
    source = call["hf_pretrained"]
    chunks = unwrap_model(as_list(call["megatron_model"]))
    config = get_model_config(chunks[0])
    if config.perform_initialization or not getattr(config, "mtp_num_layers", None):
        return result
    empty = _uninitialized_heads(call.instance, source, chunks)
    if is_on_any_rank(bool(empty), getattr(chunks[0], "pg_collection", None)):
        raise ValueError(
            f"The checkpoint {getattr(source, 'model_name_or_path', source)} lacks weights of the MTP heads, and "
            f"nothing has initialized them: {listed(empty) if empty else 'another rank names them'}. Set "
            f"model.perform_initialization=True to train new heads (Megatron-Bridge sets it to False for a model that "
            f"it loads), or write num_nextn_predict_layers 0 into config.json to have no heads"
        )
    return result
