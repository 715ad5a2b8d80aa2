"""How many gradients are zero: of the gradients that the optimizer will use, on ranks that own none as well."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any


def count_zeros_of_fsdp(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Wraps count_zeros_fp32, which looks for the gradients of Megatron-FSDP under one name (NVIDIA/Megatron-LM#4802).

    Before 0.19 that is `grad`, later what the caller says; here each parameter says where its gradient is.
    """
    call = inspect.signature(wrapped).bind(*args, **kwargs)
    params = call.arguments["parameters"]
    params = [params] if hasattr(params, "grad") else params
    call.arguments["parameters"] = [_with_one_gradient(p) if getattr(p, "__fsdp_param__", False) else p for p in params]
    return wrapped(*call.args, **call.kwargs)


def _with_one_gradient(param: Any) -> Any:
    """Something that count_zeros_fp32 takes for `param`, whichever attribute it reads."""
    grad = getattr(param, "decoupled_grad", None)
    grad = param.grad if grad is None else grad
    return SimpleNamespace(**{"__fsdp_param__": True, "grad": grad, "decoupled_grad": grad})


def count_zeros_of_none(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Wraps count_zeros of MegatronOptimizer and ChainedOptimizer: from 0.18 on both look at their first parameter.

    A rank that owns no parameter has no first one, and the others wait for its zeros.
    """
    from megatron.core.optimizer.clip_grads import count_zeros_fp32

    from megatron_overrides.core.optimizer.optimizer import leaves

    is_shared = getattr(instance, "grads_states_parallel_group_is_shared", lambda: True)
    if any(leaf.get_parameters() for leaf in leaves(instance)) or not is_shared():
        return wrapped(*args, **kwargs)
    return count_zeros_fp32([], grad_stats_parallel_group=instance.get_grad_stats_parallel_group())
