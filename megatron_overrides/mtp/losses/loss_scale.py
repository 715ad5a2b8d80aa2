"""The scale of the MTP loss, which may differ from that of the main loss: `config.mtp_grad_scale_func`."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call


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


def exclude_callable_fields(call: Call) -> None:
    """Wraps ArgumentGroupFactory.__init__, whose callers list what to leave out: a Callable has no argparse type."""
    call.proceed()
    call.instance.exclude.add("mtp_grad_scale_func")
