"""The gradients and parameters that each data-parallel rank has whole, with the sharding strategy no_shard.

Before 0.18 a norm is a sum over all ranks, so it counts each of these gradients once for each rank; since
NVIDIA/Megatron-LM#3754 it is a sum over the ranks of tensor and pipeline parallelism, which have all experts once only
where EP x ETP is TP. The number of zeros counts what tensor-parallel ranks replicate on each of them:
NVIDIA/Megatron-LM#5879.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import is_megatron_fsdp
from megatron_overrides.norms.replicas import first_replicas, param_is_not_tensor_parallel_duplicate


def build_counting_first_replicas(call: Call) -> Any:
    """Wraps _get_megatron_optimizer_based_on_param_groups: with no_shard, sums over all ranks count each gradient once.

    Those of a whole instance take part: which ranks have the other experts depends on how EP and ETP lie over TP.
    """
    optimizer = call.proceed()
    chunks = [chunk for chunk in call["model_chunks"] if is_megatron_fsdp(chunk)]
    if chunks and chunks[0].ddp_config.data_parallel_sharding_strategy == "no_shard":
        optimizer.grad_stats_parallel_group = _ranks_of_instance(call)
        for param in optimizer.get_parameters():
            is_expert = not getattr(param.orig_param, "allreduce", True)  # as Megatron-FSDP asks
            replicas = param.megatron_fsdp_dist_index.get_fsdp_group(is_expert_parallel=is_expert)  # of an instance
            param._mtp_patches_is_first_replica = replicas.rank() == 0
    return optimizer


def _ranks_of_instance(call: Call) -> Any:
    """The process group over which the distributed optimizer sums; None for all ranks."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    if call["intra_dist_opt_group"] is not call["model_parallel_group"]:
        return call["intra_dist_opt_group"]
    groups = ProcessGroupCollection.setup_process_groups_for_optimizer(
        call["pg_collection"], call["model_chunks"], use_gloo_process_groups=False
    )
    return groups["intra_dist_opt_group"]


def count_zeros_of_first_replicas(call: Call) -> float:
    """Wraps count_zeros_fp32, which counts what Megatron-FSDP has on each rank (NVIDIA/Megatron-LM#5879)."""
    params = call["parameters"]
    params = first_replicas([params] if hasattr(params, "grad") else params)
    tp_groups = call.get("tp_group"), call.get("expert_tp_group")
    call["parameters"] = [
        param
        for param in params
        if not getattr(param, "__fsdp_param__", False) or param_is_not_tensor_parallel_duplicate(param, *tp_groups)
    ]
    return call.proceed()


def reduce_gradients_of_replicas(call: Call) -> None:
    """Wraps ParamAndGradBuffer.all_reduce_gradients, which skips all groups of parameters that have gradients."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    ddp_config = call.instance.ddp_config
    check = getattr(param_and_grad_buffer, "_check_nan_in_grad", None)  # 0.16.1 has none
    for group in call.instance.parameter_groups:
        buffer = group.main_grad_buffer
        if buffer is not None:
            if check is not None and ddp_config.check_for_nan_in_grad:
                check(buffer.data)
            op = param_and_grad_buffer.gradient_reduce_preprocessing(
                buffer.data, buffer.gradient_scaling_factor, ddp_config
            )
            torch.distributed.all_reduce(buffer.data, op=op, group=buffer.data_parallel_group)


def gather_no_replicas(call: Call) -> None:
    """Wraps MegatronFSDP.start_param_sync, which gathers parameters that no_shard does not shard."""
    if call.instance.data_parallel_sharding_strategy == "no_shard":
        call.instance._replace_param_with_raw_if_needed()
    else:
        call.proceed()
