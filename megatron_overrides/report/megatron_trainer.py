"""Put our metrics where Megatron's own are: its lines for training and validation, TensorBoard, W&B and its FLOPs.

Which numbers: support/training_metrics.py and support/validation_metrics.py.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer
from megatron.training.utils import print_rank_last

from megatron_overrides.call import Call
from megatron_overrides.report.training_metrics import in_training_log, training_metrics
from megatron_overrides.report.validation_metrics import validate, validation_line
from megatron_overrides.settings.model_settings import is_main_model_frozen


def log_metrics(call: Call) -> Any:
    """Wraps training_log, which builds its line in a local variable and prints it with print_rank_last."""
    iteration = call.get("iteration")
    with in_training_log():
        result = call.proceed()
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    if writer and iteration is not None and iteration % get_args().tensorboard_log_interval == 0:
        for metric in training_metrics():
            if metric.tag:
                writer.add_scalar(metric.tag, float(metric.value), iteration)
                if wandb:
                    wandb.log({metric.tag: float(metric.value)}, iteration)
    return result


def count_main_model_logits(call: Call) -> Any:
    """Wraps num_floating_point_operations(args, batch_size, ...): the heads are compared with logits of one matmul.

    It is a forward pass without a backward pass (NVIDIA/Megatron-LM#6473).
    """
    flops = call.proceed()
    settings = call["args"]
    # Arguments that another parser has made lack the added settings.
    loss_type = getattr(settings, "mtp_loss_type", "cross_entropy")
    if not getattr(settings, "mtp_num_layers", None) or loss_type == "cross_entropy":
        return flops
    return flops + 2 * _tokens_in_batch(call) * settings.hidden_size * settings.padded_vocab_size


def _tokens_in_batch(call: Call) -> int:
    """Return how many tokens the call of num_floating_point_operations counts; those of packed sequences lack padding.

    Releases before 0.18 count padding, too.
    """
    return call.get("total_real_tokens_in_batch") or call["batch_size"] * call["args"].seq_length


def count_no_backward_of_main_model(call: Call) -> Any:
    """Wraps num_floating_point_operations(args, batch_size, ...): a frozen main model has a forward pass only.

    Megatron counts three times the forward pass for everything. A head trains through the output layer without a
    gradient of its weight.
    """
    flops = call.proceed()
    settings = call["args"]
    if not is_main_model_frozen(settings):
        return flops
    call["args"] = main_model = copy.copy(settings)
    main_model.mtp_num_layers = None
    if pattern := getattr(settings, "hybrid_layer_pattern", None):
        main_model.hybrid_layer_pattern = pattern.partition("/")[0]
    if isinstance(frequency := getattr(settings, "linear_attention_freq", None), list):
        main_model.linear_attention_freq = frequency[: settings.num_layers]
    of_main_model = call.proceed()
    of_heads = flops - of_main_model
    if of_heads:  # Megatron 0.16 counts none in a hybrid model
        weight_gradients = 2 * _tokens_in_batch(call) * settings.hidden_size * settings.padded_vocab_size
        of_heads -= settings.mtp_num_layers * weight_gradients
    return of_main_model / 3 + of_heads


def report_heads(call: Call) -> Any:
    """Wraps evaluate_and_print_results(prefix, ..., iteration, ..., write_to_tensorboard): adds a line for each set."""
    result, sets = validate(call)
    for number, measured in enumerate(sets):
        suffix = _suffix(number)
        print_rank_last(validation_line(call["prefix"], measured, suffix))
        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        if not writer or not call["write_to_tensorboard"]:
            continue
        for name, value in measured.items():
            tag = f"{name} validation{suffix}"
            writer.add_scalar(tag, value, call["iteration"])
            if wandb:
                wandb.log({tag: value}, call["iteration"])
    return result


def _suffix(number: int) -> str:
    """What Megatron writes after "validation" for one of several validation sets."""
    settings = get_args()
    if not getattr(settings, "multiple_validation_sets", False):
        return ""
    names = getattr(settings, "validation_set_names", None)
    return f"-{names[number] if names else number}"
