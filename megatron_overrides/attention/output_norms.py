"""The gradients of the output norms of gated delta nets, which each tensor-parallel rank has whole."""

from __future__ import annotations

from megatron_overrides.call import Call

# The class up to 0.19, and what it and GatedDeltaNet2 have in common on main; their modules depend on the release.
_BASES_OF_GATED_DELTA_NET = {"GatedDeltaNet", "_GDNBase"}


def sum_gradients_of_output_norms(call: Call) -> None:
    """Wraps _allreduce_non_tensor_model_parallel_grads, which leaves out the output norm of GatedDeltaNet.

    NVIDIA/Megatron-LM#7452: each tensor-parallel rank has a copy of its weight and the gradient of its own heads. With
    sequence parallelism Megatron adds these up. Without, they are scaled and go with those that it averages.
    """
    from megatron.core import parallel_state

    group = call["tp_group"]
    size = (parallel_state.get_tensor_model_parallel_group() if group is None else group).size()
    if size == 1 or call["config"].sequence_parallel:
        call.proceed()
        return
    weights = [
        param
        for chunk in call["model"]
        for module in chunk.modules()
        if _BASES_OF_GATED_DELTA_NET.intersection(one.__name__ for one in type(module).__mro__)
        for param in module.out_norm.parameters()
        if param.requires_grad and not hasattr(param, "average_gradients_across_tp_domain")
    ]
    for weight in weights:
        gradient = getattr(weight, "main_grad", weight.grad)
        if gradient is not None:
            gradient.mul_(size)
        weight.average_gradients_across_tp_domain = True
    call.proceed()
    for weight in weights:
        del weight.average_gradients_across_tp_domain
