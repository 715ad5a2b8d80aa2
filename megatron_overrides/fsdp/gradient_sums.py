"""The sums of gradients over the microbatches of a step under Megatron-FSDP, and their dtype.

A sharded gradient has a shard, to which the reduced gradients of each microbatch are added. A gradient that is not
sharded has the whole buffer: backward passes add to it, and the reduced gradients replace the part of this rank.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.mtp.heads.repeated_heads import is_repeated

logger = logging.getLogger(__name__)

_UNSHARDED = ("no_shard", "optim")  # the strategies that leave gradients whole


def shard_gradients_of_single_replicas(call: Call) -> None:
    """Wraps DataParallelBuffer.__init__: gradients that are to be sharded have a shard, also if it is all of them.

    NVIDIA/Megatron-LM#6660: where a group has one rank, Megatron does not shard, and goes on as if it did. It reduces
    in each microbatch what the buffer has of all so far, and backward passes overwrite it. The other buffers stay, as
    do one whose place in another is given and one with weights that have a backward pass for each depth: Megatron-FSDP
    overwrites a shard with each pass, and adds to a whole buffer.
    """
    is_of_gradients = "gradient_scaling_factor" in call.kwargs and call["shard_bucket_index"] is None
    is_sharded = call["ddp_config"].data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")
    is_overwritten = any(getattr(param, "has_backward_of_each_depth", False) for param in call["params"])
    if is_of_gradients and is_sharded and not is_overwritten and call["data_parallel_group"].size() == 1:
        call["is_data_distributed"] = True
    call.proceed()


def mark_recomputed_depths(call: Call) -> None:
    """Wraps FullyShardedDataParallel.__init__(config, ddp_config, module, ...): marks what the wrapper above leaves.

    A repeated MTP layer that is recomputed runs backward for each depth by itself, outside of the pass that calls it.
    """
    config = call["config"]
    is_recomputed = config.recompute_granularity == "full" and config.recompute_method != "block"
    if is_recomputed and is_repeated(config):
        for block in call["module"].modules():
            if hasattr(block, "mtp_use_repeated_layer"):
                for param in block.parameters():
                    param.has_backward_of_each_depth = True
    call.proceed()


def add_gradients_of_backward_passes(call: Call) -> None:
    """Wraps MegatronFSDP.all_gather_and_wait_parameters_ready, after which a backward pass overwrites `main_grad`.

    NVIDIA/Megatron-LM#6357: that is right for sharded gradients alone.
    """
    call.proceed()
    if call.instance.data_parallel_sharding_strategy in _UNSHARDED:
        for param in call["params"]:
            param.overwrite_main_grad = False
            param.sums_main_grad = True


def leave_sums_of_fused_experts(call: Call) -> None:
    """Wraps TEGroupedMLP._ensure_main_grad_for_fused_impl (0.19, main), called before each forward pass of the experts.

    It has backward passes overwrite `main_grad`, also where the wrapper above has them add to it.
    """
    call.proceed()
    for linear in (call.instance.linear_fc1, call.instance.linear_fc2):
        for param in linear.parameters(recurse=False):
            if getattr(param, "sums_main_grad", False):
                param.overwrite_main_grad = False


def fuse_no_gradients_of_own_layers(call: Call) -> None:
    """Wraps FullyShardedDataParallel.__init__(config, ddp_config, module, ...) of Megatron-FSDP.

    Megatron's own linear layers, as the output layer is, have a fused gradient overwrite `main_grad` in any case. What
    is not fused, Megatron-FSDP adds up.
    """
    if call["ddp_config"].data_parallel_sharding_strategy in _UNSHARDED:
        for module in call["module"].modules():
            if getattr(module, "gradient_accumulation_fusion", False):
                module.gradient_accumulation_fusion = False
    call.proceed()


def put_reduced_shards_in_place(call: Call) -> Any:
    """Wraps GradReducePipeline._bucket_group_gradient_reduce, which in 0.16 adds what it reduces to its input.

    NVIDIA/Megatron-LM#3067: with `optim` a rank's shard is a part of the buffer that is reduced.
    """
    pipeline = call.instance
    buffers = [pipeline.get_fsdp_buffer(bucket_id) for bucket_id in call["bucket_group"]]
    if pipeline.buffer.ddp_config.data_parallel_sharding_strategy != "optim":
        return call.proceed()
    for buffer in buffers:
        shard = buffer.get_shard_from_local_buffer()
        buffer.get_shard_from_local_buffer = lambda shard=shard: _Overwritten(shard)
    try:
        return call.proceed()
    finally:
        for buffer in buffers:
            del buffer.get_shard_from_local_buffer


class _Overwritten:
    """A tensor that is overwritten by what is added to it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __iadd__(self, other: Any) -> _Overwritten:
        self.tensor.copy_(other)
        return self


def sum_gradients_in_fp32(call: Call) -> None:
    """Wraps FullyShardedDataParallel.__init__, which reads grad_reduce_in_fp32 before 0.19 only."""
    ddp_config = call["ddp_config"]
    main_grads_dtype = getattr(ddp_config, "megatron_fsdp_main_grads_dtype", torch.float32)  # before 0.19 there is none
    if ddp_config.grad_reduce_in_fp32 and main_grads_dtype is None:
        if call["config"].params_dtype != torch.float32:
            log_single_rank(
                logger,
                logging.WARNING,
                "Megatron-FSDP keeps gradients in fp32, as --accumulate-allreduce-grads-in-fp32 says: 4 bytes for each "
                "parameter whose gradient a rank keeps. --megatron-fsdp-main-grads-dtype takes another dtype",
            )
        call["ddp_config"] = dataclasses.replace(ddp_config, megatron_fsdp_main_grads_dtype=torch.float32)
    call.proceed()
