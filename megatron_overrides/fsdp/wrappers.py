"""The wrappers around optimizers of Megatron-FSDP and the arguments that ask for them.

It keeps fp32 main weights, sharded as DTensors, and gives those to the optimizer. With --use-precision-aware-optimizer
FusedAdam copied them once more, 4 bytes for each element, and waited for gradients under a name (`decoupled_grad`) that
Megatron-FSDP never used: NVIDIA/Megatron-LM#4133, #4024, #4427.

NVIDIA/Megatron-LM#5976: `fully_shard_optimizer` creates the state, for checkpoints to load into, by a step with
gradients of zero. Adam then takes the first real step for the second, and weight decay shrinks the parameters once
more.

With no_shard each data-parallel rank has all gradients. Before 0.18 the norm is a sum over all ranks, so it counts each
of them once for each rank; since NVIDIA/Megatron-LM#3754 it is a sum over the ranks of tensor and pipeline parallelism,
which have all experts once only where EP x ETP is TP. The number of zeros counts what tensor-parallel ranks replicate
on each of them: NVIDIA/Megatron-LM#5879.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.norms.replicas import first_replicas, param_is_not_tensor_parallel_duplicate

logger = logging.getLogger(__name__)


def enforce_megatron_fsdp_args(call: Call) -> Any:
    """Wraps validate_args(args, defaults): what Megatron-FSDP needs of the optimizer, as NVIDIA/Megatron-LM#4133."""
    settings = call["args"]
    if getattr(settings, "use_megatron_fsdp", False) and getattr(settings, "megatron_fsdp_version", 1) == 1:
        if settings.optimizer not in ("adam", "sgd"):
            raise ValueError(
                f"--use-megatron-fsdp cannot shard the state of --optimizer {settings.optimizer}: choose adam or sgd, "
                f"or leave --use-megatron-fsdp out"
            )
        if not settings.use_distributed_optimizer:
            log_single_rank(logger, logging.WARNING, "--use-megatron-fsdp sets --use-distributed-optimizer")
        if getattr(settings, "reuse_grad_buf_for_mxfp8_param_ag", False):
            log_single_rank(logger, logging.WARNING, "--use-megatron-fsdp unsets --reuse-grad-buf-for-mxfp8-param-ag")
        settings.use_distributed_optimizer = True
        settings.reuse_grad_buf_for_mxfp8_param_ag = False  # a buffer that Megatron-FSDP does not have
    return call.proceed()


def build_without_master_weights(call: Call) -> Any:
    """Wraps _get_megatron_optimizer_based_on_param_groups: what it builds over Megatron-FSDP reads `decoupled_grad`.

    Newer releases do half of it, in get_megatron_optimizer: they leave `store_param_remainders` set, although there
    are no master weights any more, and rely on the caller to have set megatron_fsdp_use_decoupled_grad. The optimizer
    makes its state in the first step, so all of this comes in time.
    """
    optimizer = call.proceed()
    if not call["config"].use_precision_aware_optimizer:
        return optimizer
    buffers = [chunk.param_and_grad_buffer for chunk in call["model_chunks"] if _is_megatron_fsdp(chunk)]
    fused_adam: Any = getattr(optimizer, "optimizer", None)
    if buffers and getattr(fused_adam, "master_weights", None) is not None:
        fused_adam.master_weights = False
        fused_adam.store_param_remainders = False
        fused_adam.use_decoupled_grad = True
        for buffer in buffers:
            buffer.use_decoupled_grad = True  # from 0.18 on
            buffer.use_precision_aware_optimizer = True  # its name before, which nothing ever set
    return optimizer


def _is_megatron_fsdp(chunk: Any) -> bool:
    """True if `chunk` is a model in Megatron-FSDP. Its version 2, of main, manages gradients in another way."""
    ddp_config = getattr(chunk, "ddp_config", None)  # of a chunk that nothing wraps there is none
    return getattr(ddp_config, "use_megatron_fsdp", False) and hasattr(chunk, "param_and_grad_buffer")


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


def build_counting_first_replicas(call: Call) -> Any:
    """Wraps _get_megatron_optimizer_based_on_param_groups: with no_shard, sums over all ranks count each gradient once.

    Those of a whole instance take part: which ranks have the other experts depends on how EP and ETP lie over TP.
    """
    optimizer = call.proceed()
    chunks = [chunk for chunk in call["model_chunks"] if _is_megatron_fsdp(chunk)]
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


def reload_main_weights(call: Call) -> None:
    """Wraps DistributedOptimizer._copy_model_params_to_main_params, which 0.18 and later refuse for Megatron-FSDP.

    Without it --finetune and --no-load-optim end in a NotImplementedError after the checkpoint is loaded.
    """
    if not call.instance.ddp_config.use_megatron_fsdp:
        return call.proceed()
    for chunk in call.instance.model_chunks:
        if chunk.module.is_param_fsdp_distributed:
            # The model shows its main weights as its parameters, so a checkpoint was loaded into them.
            chunk.module.install_optimized_model_weights()
        else:
            _take_over_model_weights(chunk.param_and_grad_buffer)
        chunk.module.synchronize_param_gather()  # what is gathered of the old weights must not be computed with
    if hasattr(call.instance.optimizer, "update_fp32_param_by_new_param"):
        call.instance.optimizer.update_fp32_param_by_new_param()  # --optimizer-cpu-offload has a copy of them


@torch.no_grad()
def _take_over_model_weights(buffer: Any) -> None:
    """Copy what the model computes with to the main weights, but only where it has been changed.

    A main weight that rounds to its model weight is the better one of the two: it has the bits that rounding drops.
    """
    for group in buffer.parameter_groups:
        main_weights, model_weights = group.main_weight_buffer, group.model_weight_buffer
        if main_weights is None:
            continue  # the optimizer has the model's weights themselves
        sharded = main_weights.is_data_distributed or (model_weights and model_weights.is_data_distributed)
        for param in group.params:
            place = main_weights.param_idx[param]
            main = main_weights.get_item(place, only_shard=sharded)
            model = model_weights.get_item(place, only_shard=sharded) if model_weights else param.detach()
            if not model.is_floating_point():
                raise NotImplementedError(
                    "Megatron-FSDP's quantized model weights cannot be made its main weights: change the parameters "
                    "that model.state_dict() shows, then call optimizer.reload_model_params()"
                )
            model = model.view(main.shape)
            main.copy_(torch.where(main.to(model.dtype) == model, main, model.to(main.dtype)))


def create_state_without_a_step(call: Call) -> torch.optim.Optimizer:
    """Wraps fully_shard_optimizer: its step is one with a learning rate and a weight decay of zero, and not counted."""
    optimizer = call["optimizer"]
    settings = [
        (group, {name: group[name] for name in ("lr", "weight_decay") if name in group})
        for group in optimizer.param_groups
    ]
    counts = {id(place): _copy(place["step"]) for place in _places_with_steps(optimizer)}
    for group, values in settings:
        group.update({name: _zero_like(value) for name, value in values.items()})
    try:
        return call.proceed()
    finally:
        for group, values in settings:
            group.update(values)
        for place in _places_with_steps(optimizer):
            place["step"] = counts.get(id(place), _zero_like(place["step"]))


def _places_with_steps(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """The dictionaries that count steps: the parameters' states in PyTorch's optimizers, the groups in FusedAdam."""
    for place in (*optimizer.param_groups, *optimizer.state.values()):
        if "step" in place:
            yield place


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _zero_like(value: Any) -> Any:
    """Zero as a tensor where `value` is one: a capturable optimizer needs its learning rate on the device."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
