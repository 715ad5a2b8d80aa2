"""Megatron-FSDP's main weights take over what a checkpoint has loaded into the model."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overrides.call import Call


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
