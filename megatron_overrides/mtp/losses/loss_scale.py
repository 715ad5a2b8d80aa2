"""The scale of the MTP loss, which may differ from that of the main loss: `config.mtp_grad_scale_func`."""

from __future__ import annotations

from typing import Any

import torch


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
