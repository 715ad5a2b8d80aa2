"""The parameters that an offloaded optimizer steps, after the model's are loaded."""

from __future__ import annotations

import copy

from megatron_overrides.call import Call


def refresh_offloaded_params(call: Call) -> None:
    """Wraps DistributedOptimizer._copy_model_params_to_main_params, which leaves an offloaded optimizer to itself.

    NVIDIA/Megatron-LM#5071: that one refreshes only what it holds in fp32 of weights in half precision. Unless it is
    precision-aware, its weights are the shards in fp32, which are to be refreshed first as without offloading, and then
    its copies of them.
    """
    call.proceed()
    offloaded = call.instance.optimizer
    copies = getattr(offloaded, "param_to_inner_param", None)  # HybridDeviceOptimizer's
    if copies is None:
        return
    if not call.instance.ddp_config.use_megatron_fsdp:
        without_offloading = copy.copy(call.instance)
        without_offloading.optimizer = None
        call.proceed(without_offloading)
    for param, inner_param in copies.items():
        if inner_param is not param:
            inner_param.data.copy_(param)
