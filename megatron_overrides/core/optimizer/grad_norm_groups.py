"""Which parameters have a gradient norm of their own, and which gradients enter a norm.

NVIDIA/Megatron-LM#4116, with the names that it has there: a parameter tagged `grad_norm_group = "mtp"` is left out of
the main norm and clipped by the norm of its group.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

MTP_GRAD_NORM_GROUP = "mtp"
GRAD_NORM_GROUP_ATTR = "grad_norm_group"
SEPARATE_GRAD_NORM_GROUPS = (MTP_GRAD_NORM_GROUP,)


def group_of(param: Any) -> str | None:
    """The group that `param` is tagged with; Megatron-FSDP's shards refer to the parameter that carries the tag.

    Raises:
        ValueError: a group that no optimizer knows, whose gradients would enter no norm.
    """
    group = getattr(param, GRAD_NORM_GROUP_ATTR, None)
    if group is None:
        original = getattr(param, "orig_param", None)
        if original is None:  # asked of every parameter in every step, and this is the answer
            return None
        group = getattr(original, GRAD_NORM_GROUP_ATTR, None)
    if group is not None:
        check_group(group)
    return group


def check_group(group: str) -> None:
    if group not in SEPARATE_GRAD_NORM_GROUPS:
        raise ValueError(f"Unknown grad_norm_group {group!r}; known: {', '.join(SEPARATE_GRAD_NORM_GROUPS)}")


def gradient_of(param: Any, config: Any) -> torch.Tensor | None:
    """The gradient that the optimizer will use, a DTensor's local part included."""
    grad = param.decoupled_grad if has_decoupled_grad(param, config) else param.grad
    if getattr(param, "__fsdp_param__", False):
        return getattr(grad, "_local_tensor", grad)
    return grad


def has_decoupled_grad(param: Any, config: Any) -> bool:
    """Whether a precision-aware optimizer reads `decoupled_grad` of this parameter.

    Asked of the parameter itself: the releases differ in when such an optimizer uses the attribute, and Megatron-FSDP
    differs again.
    """
    return config.use_precision_aware_optimizer and getattr(param, "decoupled_grad", None) is not None


def drop_gradients(params: list[Any], optimizer: Any) -> None:
    """Leave `params` out of the coming update of `optimizer`, a torch optimizer: it passes over those without gradient.

    HybridDeviceOptimizer (--optimizer-cpu-offload) steps on copies, which keep the gradient of the step before.
    """
    for param in params:
        param.grad = None
        if hasattr(param, "decoupled_grad"):
            param.decoupled_grad = None
        for copies in ("gpu_params_map_cpu_copy", "param_to_fp32_param"):
            its_copy = getattr(optimizer, copies, {}).get(param)
            if its_copy is not None:
                its_copy.grad = None
                optimizer.cpu_copy_map_grad.pop(its_copy, None)  # made again with the next gradient


def keep_in_step(params: list[Any], leaf: Any) -> None:
    """After an update without `params`: their state is there, and has counted as many steps as that of the others.

    So it is with fused optimizers, which count for all parameters at once. torch's Adam counts for each, and then
    DistributedOptimizer, which saves one count for all and the state of each, could not save.
    """
    optimizer = getattr(leaf, "optimizer", None)  # one of somebody else's may be none of Megatron's kind
    if not params or optimizer is None or hasattr(optimizer, "cpu_optimizers"):  # the offloading one makes its state
        return
    if not all(optimizer.state.get(param) for param in params) and hasattr(leaf, "init_state_fn"):
        leaf.init_state_fn(optimizer, leaf.config)
    counts = {param: state["step"] for param, state in optimizer.state.items() if "step" in state}
    left_out = {id(param) for param in params}
    others = [count for param, count in counts.items() if id(param) not in left_out]
    if not others and isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        others = [torch.tensor(1.0)]  # heads alone, in their first step
    for param in params:
        if param in counts:
            counts[param] += 1
        elif others:
            optimizer.state[param]["step"] = copy.deepcopy(others[0])


def copy_optimizer_param_metadata(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy what the optimizer reads off a parameter to its shard or its main copy."""
    for name in ("allreduce", "shared", GRAD_NORM_GROUP_ATTR, "is_mtp_param"):
        if hasattr(source, name):
            setattr(destination, name, getattr(source, name))


def copy_tags_too(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps copy_tensor_model_parallel_attributes(destination, source), called for every shard and main copy."""
    wrapped(*args, **kwargs)
    destination, source = inspect.signature(wrapped).bind(*args, **kwargs).args
    group = group_of(source)
    if group is not None:
        setattr(destination, GRAD_NORM_GROUP_ATTR, group)
        destination.is_mtp_param = True


# -- methods of MegatronOptimizer that 0.19 has -----------------------------------------------------------------------


def _filter_grads_for_norm(
    self: Any, params: list[torch.nn.Parameter], param_filter: Callable[[Any], bool] | None = None
) -> list[torch.Tensor]:
    """The gradients of `params` that pass `param_filter` and belong to no replica on another rank."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    tp_group = getattr(self, "tp_group", None)
    grads = []
    for param in params:
        if param_filter is None or param_filter(param):
            grad = gradient_of(param, self.config)
            if (
                grad is not None
                and param_is_not_shared(param)
                and param_is_not_tensor_parallel_duplicate(param, tp_group)
            ):
                grads.append(grad)
    return grads


def get_grads_for_grad_norm(self: Any, grad_norm_group: str | None = None) -> list[torch.Tensor]:
    """The gradients on this rank that make up the norm of a group, or the main norm (None)."""
    if grad_norm_group is not None:
        check_group(grad_norm_group)
    return self._filter_grads_for_norm(self.get_parameters(), lambda param: group_of(param) == grad_norm_group)


def get_main_grads_for_grad_norm(self: Any) -> list[torch.Tensor]:
    """As up to 0.18: what the main norm is made of."""
    return self.get_grads_for_grad_norm()
