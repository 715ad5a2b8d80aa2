"""The wrappers around Megatron's count of gradients that are zero."""

from __future__ import annotations

from megatron_overrides.call import Call
from megatron_overrides.norms.gradients import with_one_gradient
from megatron_overrides.norms.optimizer_tree import leaves


def count_zeros_of_fsdp(call: Call) -> float:
    """Wraps count_zeros_fp32, which looks for the gradients of Megatron-FSDP under one name (NVIDIA/Megatron-LM#4802).

    Before 0.19 that is `grad`, later the caller decides; here each parameter is asked for its gradient.
    """

    params = call["parameters"]
    params = [params] if hasattr(params, "grad") else params
    call["parameters"] = [with_one_gradient(p) if getattr(p, "__fsdp_param__", False) else p for p in params]
    return call.proceed()


def count_zeros_without_params(call: Call) -> float:
    """Wraps count_zeros of MegatronOptimizer and ChainedOptimizer: from 0.18 on both read params[0].

    A rank without parameters fails there, and the others hang in its all-reduce.
    """
    from megatron.core.optimizer.clip_grads import count_zeros_fp32

    is_shared = getattr(call.instance, "grads_states_parallel_group_is_shared", lambda: True)
    if any(leaf.get_parameters() for leaf in leaves(call.instance)) or not is_shared():
        return call.proceed()
    return count_zeros_fp32([], grad_stats_parallel_group=call.instance.get_grad_stats_parallel_group())
