"""Methods of other libraries' optimizer classes that the norms of a step have to respect."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from megatron_overrides.norms.gradients import filter_grads, get_grads_for_grad_norm, get_main_grads_for_grad_norm
from megatron_overrides.norms.groups import Group


def is_overridden(owner: Any, name: str, ours: Any) -> bool:
    """True if a class, or an object, has another method of this name than `ours`."""
    return inspect.getattr_static(owner, name, ours) is not ours


def is_foreign(owner: Any, name: str, ours: Any) -> bool:
    """True if a method is neither ours nor Megatron's own, which is there if the patch with ours is not applied."""
    method = inspect.getattr_static(owner, name, ours)
    return method is not ours and not getattr(method, "__module__", "").startswith("megatron.core.")


def group_grads(leaf: Any, group: Group, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients of a group, which has these parameters.

    Another library's class may choose them itself, those of the main group by the name of up to 0.18.
    """
    if group is None and is_foreign(type(leaf), "get_main_grads_for_grad_norm", get_main_grads_for_grad_norm):
        return leaf.get_main_grads_for_grad_norm()
    if is_foreign(type(leaf), "get_grads_for_grad_norm", get_grads_for_grad_norm):
        return leaf.get_grads_for_grad_norm(group)
    return filter_grads(leaf, params)
