"""Scale the gradients of each norm group down to the limit of that group."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import optimizer as upstream

from megatron_overrides.norms.gradients import has_decoupled_grad, local_part
from megatron_overrides.norms.groups import MTP_GRAD_NORM_GROUP, clip_limit
from megatron_overrides.norms.optimizer_tree import is_exempt, leaves, params_to_clip
from megatron_overrides.norms.values import GradNorm, GradNorms


def clip(optimizer: Any, norms: GradNorms, main_limit: float | None = None, skips_mtp: bool = False) -> None:
    """Clip the gradients of every optimizer below `optimizer` that is not exempt.

    Args:
        main_limit: in place of `config.clip_grad`, for parameters of the main group.
        skips_mtp: leave the gradients of the MTP heads as they are, because they will be dropped.
    """
    for leaf in leaves(optimizer):
        if is_exempt(leaf):
            continue
        for group, params in params_to_clip(leaf, norms.census).items():
            if skips_mtp and group == MTP_GRAD_NORM_GROUP:
                continue
            limit = main_limit if group is None and main_limit is not None else clip_limit(leaf.config, group)
            scale_to_limit(params, limit, norms.clipping.get(group, norms.clipping[None]), leaf.config)


def scale_to_limit(params: list[torch.nn.Parameter], limit: float, norm: GradNorm, config: Any) -> None:
    """Scale the gradients of `params`, whose norm is `norm`, down to `limit`; 0 leaves them alone."""
    if not limit > 0.0:
        return
    least = getattr(config, "min_clip_coefficient", None)
    if least is not None:
        # Megatron's coefficient is limit / (norm + 1e-6).
        largest = limit / least - 1e-6
        norm = norm.clamp(max=largest) if isinstance(norm, torch.Tensor) else min(norm, largest)
    # By Megatron's name for it, so that a faster one that another library has put there is called.
    for is_decoupled, same_dtype in _launches(params, config):
        upstream.clip_grad_by_total_norm_fp32(
            same_dtype, max_norm=limit, total_norm=norm, use_decoupled_grad=is_decoupled
        )


def _launches(params: list[torch.nn.Parameter], config: Any) -> list[tuple[bool, list[torch.nn.Parameter]]]:
    """(whether gradients are in `decoupled_grad`, the parameters), each for one launch of a kernel over tensors.

    Megatron's function reads one attribute, and the kernel the dtype of the first gradient (see `by_dtype`).
    """
    grouped: dict[tuple[bool, torch.dtype], list[torch.nn.Parameter]] = {}
    for param in params:
        is_decoupled = has_decoupled_grad(param, config)
        grad = local_part(param.decoupled_grad if is_decoupled else param.grad)
        if grad is not None and grad.numel():
            grouped.setdefault((is_decoupled, grad.dtype), []).append(param)
    return [(is_decoupled, same_dtype) for (is_decoupled, _), same_dtype in grouped.items()]
