"""The fp32 main weights of Megatron-FSDP, sharded as DTensors, are those that the optimizer steps.

With --use-precision-aware-optimizer FusedAdam copied them once more, 4 bytes for each element, and waited for gradients
under a name (`decoupled_grad`) that Megatron-FSDP never used: NVIDIA/Megatron-LM#4133, #4024, #4427.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import is_megatron_fsdp

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
    buffers = [chunk.param_and_grad_buffer for chunk in call["model_chunks"] if is_megatron_fsdp(chunk)]
    fused_adam: Any = getattr(optimizer, "optimizer", None)
    if buffers and getattr(fused_adam, "master_weights", None) is not None:
        fused_adam.master_weights = False
        fused_adam.store_param_remainders = False
        fused_adam.use_decoupled_grad = True
        for buffer in buffers:
            buffer.use_decoupled_grad = True  # from 0.18 on
            buffer.use_precision_aware_optimizer = True  # its name before, which nothing ever set
    return optimizer


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
