"""Leave parameters out of an update: all of them, or the MTP heads, whose optimizer state keeps in step."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatron_overrides.norms.groups import MTP_GRAD_NORM_GROUP
from megatron_overrides.norms.optimizer_tree import leaves, params_to_clip
from megatron_overrides.norms.values import GradNorms


def skip_update(optimizer: Any) -> None:
    """Give the model back the gradients that an update would have given back."""
    for leaf in leaves(optimizer):
        # Megatron-FSDP v2 (main) steps on casted gradients and gives the model its own back only after an update.
        casted = getattr(leaf, "_casted_grads", [])
        while casted:
            param, model_grad = casted.pop()
            param.grad = None
            param.grad_dtype = model_grad.dtype
            param.grad = model_grad


def drop_mtp_gradients(optimizer: Any, norms: GradNorms) -> None:
    """Leave the MTP heads out of the coming update."""
    for leaf, params in _mtp_params(optimizer, norms):
        drop_gradients(params, getattr(leaf, "optimizer", None))


def count_dropped_step(optimizer: Any, norms: GradNorms) -> None:
    """After an update without the MTP heads: count it in their optimizer state too."""
    for leaf, params in _mtp_params(optimizer, norms):
        keep_in_step(params, leaf)


def _mtp_params(optimizer: Any, norms: GradNorms) -> list[tuple[Any, list[torch.nn.Parameter]]]:
    owned = ((leaf, params_to_clip(leaf, norms.census).get(MTP_GRAD_NORM_GROUP)) for leaf in leaves(optimizer))
    return [(leaf, params) for leaf, params in owned if params]


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
                optimizer.cpu_copy_map_grad.pop(its_copy, None)  # created again with the next gradient


def keep_in_step(params: list[Any], leaf: Any) -> None:
    """After an update without `params`: create their state, and let it count as many steps as that of the others.

    Fused optimizers keep one count for all parameters; torch's Adam keeps one for each. DistributedOptimizer saves one
    count for all and the state of each, so it could not save where the counts differ.
    """
    optimizer = getattr(leaf, "optimizer", None)  # that of another library may be none of Megatron's kind
    if not params or optimizer is None or hasattr(optimizer, "cpu_optimizers"):  # the offloading one creates its state
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
