"""What training with MTP heads needs of the schedules.

The MTP loss is scaled separately from the main loss, gradients of zero are sent back where the main model is frozen,
and the heads are checked before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_overrides.call import Call
from megatron_overrides.settings.model_settings import is_main_model_frozen


def _get_mtp_loss_scale(config: Any, device: torch.device) -> torch.Tensor:
    """Return the scale of the MTP loss, one element on `device`, as schedules._get_mtp_loss_scale of 0.19 does.

    It is `config.mtp_grad_scale_func()` if there is one, else `config.grad_scale_func(ones)`, else one.

    Raises:
        ValueError: a function returned more than one element.
    """
    for name, arguments in (("mtp_grad_scale_func", ()), ("grad_scale_func", (torch.ones(1, device=device),))):
        scale_func = getattr(config, name, None)
        if scale_func is not None:
            scale = torch.as_tensor(scale_func(*arguments), device=device)
            if scale.numel() != 1:
                raise ValueError(
                    f"{name} must return a scalar or a tensor of one element, the scale of the loss; it returned "
                    f"{scale.numel()} elements"
                )
            return scale
    return torch.ones(1, device=device)


def scale_mtp_loss(call: Call) -> Any:
    """Wraps forward_step_calc_loss, which gives the MTP loss the scale of the main loss: replaces that scale."""
    # Imported here because that module imports the schedules.
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    output_tensor, num_tokens = call.proceed()
    config = call["config"]
    if getattr(config, "mtp_num_layers", None) is not None and config.mtp_grad_scale_func is not None:
        tensor = next(iter(output_tensor.values())) if isinstance(output_tensor, dict) else output_tensor
        scale = _get_mtp_loss_scale(config, tensor.device)
        if not config.calculate_per_token_loss:
            scale = scale / call["num_microbatches"]
        MTPLossAutoScaler.set_loss_scale(scale)
    return output_tensor, num_tokens


def return_zero_gradient(call: Call) -> Any:
    """Wraps backward_step(input_tensor, ..., config): the previous pipeline stage waits for a gradient of its output.

    A frozen main model gives none, so the schedule sends a gradient of zero.
    """
    gradients = call.proceed()
    if not is_main_model_frozen(call["config"]):
        return gradients
    inputs = call["input_tensor"]
    if not isinstance(inputs, list):
        return _zero_where_missing(gradients, inputs)
    return [_zero_where_missing(gradient, tensor) for gradient, tensor in zip(gradients, inputs, strict=True)]


def _zero_where_missing(gradient: torch.Tensor | None, tensor: torch.Tensor | None) -> torch.Tensor | None:
    return torch.zeros_like(tensor) if gradient is None and tensor is not None else gradient


def check_heads_once(call: Call) -> Any:
    """Wraps the functions that get_forward_backward_func returns (model, forward_only, pg_collection, ... by keyword).

    Here all ranks of a model begin a step, checkpoints are loaded, and nothing has been computed with the heads. A
    check of the optimizer would come after Megatron's check of the gradients, which names no parameter.
    """
    # Imported here because that module imports the schedules.
    from megatron_overrides.mtp.heads.finite_heads import check_heads

    model = call["model"]
    chunks = model if isinstance(model, list) else [model]
    is_first = not getattr(chunks[0], "_mtp_heads_are_checked", False)
    # A CUDA graph cannot be captured around a read on the host.
    if is_first and not call.get("forward_only") and not torch.cuda.is_current_stream_capturing():
        if getattr(get_model_config(chunks[0]), "mtp_num_layers", None):
            check_heads(chunks, call.get("pg_collection"))
        chunks[0]._mtp_heads_are_checked = True
    return call.proceed()
