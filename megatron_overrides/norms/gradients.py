"""The gradients that an optimizer will use, and those of them that enter a norm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_overrides.norms.groups import Group, check_group, measured_group, separate_groups
from megatron_overrides.norms.replicas import first_replicas


def local_gradient(param: Any, config: Any) -> torch.Tensor | None:
    """The gradient that the optimizer will use; of a DTensor under Megatron-FSDP, its local part."""
    grad = param.decoupled_grad if has_decoupled_grad(param, config) else param.grad
    return local_part(grad) if getattr(param, "__fsdp_param__", False) else grad


def local_part(tensor: Any) -> Any:
    """Return this rank's part of a DTensor; any other tensor, or None, itself.

    Megatron's to_local_if_dtensor is too slow for a call for each parameter in each step.
    """
    return getattr(tensor, "_local_tensor", tensor)


def has_decoupled_grad(param: Any, config: Any) -> bool:
    """True if a precision-aware optimizer reads `decoupled_grad` of this parameter.

    The parameter itself is asked: the releases differ in when such an optimizer uses the attribute, and Megatron-FSDP
    differs again.
    """
    return config.use_precision_aware_optimizer and getattr(param, "decoupled_grad", None) is not None


def by_dtype(grads: Iterable[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    """The local gradients that have elements, by dtype: lists that one launch of a kernel over tensors reads rightly.

    It reads all tensors by the dtype of the first, and leaves out those before an empty one that is the last.
    """
    grouped: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            grouped.setdefault(grad.dtype, []).append(grad)
    return grouped


# -- methods of MegatronOptimizer that 0.19 has -----------------------------------------------------------------------


def _filter_grads_for_norm(
    self: Any, params: list[torch.nn.Parameter], param_filter: Callable[[Any], bool] | None = None
) -> list[torch.Tensor]:
    """The gradients of `params` that pass `param_filter` and have no duplicate on another rank."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    tp_group = getattr(self, "tp_group", None)
    grads = []
    for param in params:
        if param_filter is None or param_filter(param):
            grad = local_gradient(param, self.config)
            if (
                grad is not None
                and param_is_not_shared(param)
                and param_is_not_tensor_parallel_duplicate(param, tp_group)
            ):
                grads.append(grad)
    return grads


def get_grads_for_grad_norm(self: Any, grad_norm_group: Group = None) -> list[torch.Tensor]:
    """The gradients on this rank that make up the norm of a group, or the main norm (None)."""
    groups = separate_groups(self.config)
    if grad_norm_group is not None:
        check_group(grad_norm_group, groups)
    params = self.get_parameters()
    return filter_grads(self, [param for param in params if measured_group(param, groups) == grad_norm_group])


def filter_grads(leaf: Any, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients of `params` that count in a norm; Megatron decides which from 0.19 on, or with the patches."""
    keep = getattr(leaf, "_filter_grads_for_norm", None) or functools.partial(_filter_grads_for_norm, leaf)
    return keep(first_replicas(params))


def get_main_grads_for_grad_norm(self: Any) -> list[torch.Tensor]:
    """The name that 0.18 and earlier call; the same gradients."""
    return self.get_grads_for_grad_norm()


def with_one_gradient(param: Any) -> Any:
    """A stand-in that count_zeros_fp32 takes for `param`, whichever attribute it reads."""
    grad = getattr(param, "decoupled_grad", None)
    grad = param.grad if grad is None else grad
    return SimpleNamespace(**{"__fsdp_param__": True, "grad": grad, "decoupled_grad": grad})
