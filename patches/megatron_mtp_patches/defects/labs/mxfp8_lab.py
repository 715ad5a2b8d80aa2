"""Code that reproductions of MXFP8 share: parameters in bf16 stand for MXFP8 ones, which need a newer GPU."""

from __future__ import annotations

from typing import Any

import torch

from .lab import compute_gradients, make_config, make_ddp, make_gpt, make_optimizer, start


def take_first_step(gathers_late: bool, **sizes: int) -> tuple[Any, Any]:
    """A GPT whose parameters are gathered through the buffer of its gradients, and its optimizer, after one step.

    It `gathers_late` if the next forward pass gathers the parameters (`--overlap-param-gather`), not the step itself.
    With `expert_model_parallel_size` it has an expert for each rank.
    """
    from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer

    start(**sizes)
    for module in (distributed_data_parallel, param_and_grad_buffer):
        module.is_float8tensor = module.is_mxfp8tensor = lambda tensor: True
    experts = {"num_moe_experts": sizes["expert_model_parallel_size"], "add_bias_linear": False} if sizes else {}
    config = make_config(bf16=True, params_dtype=torch.bfloat16, **experts, **sizes)
    shared: dict[str, Any] = {"use_distributed_optimizer": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
    shared["overlap_param_gather"] = gathers_late
    gpt = make_gpt(config).bfloat16()
    model = make_ddp(config, gpt, overlap_grad_reduce=gathers_late, fp8_param_gather=True, **shared)
    optimizer = make_optimizer(model, bf16=True, **shared)
    if gathers_late:
        model.disable_forward_pre_hook(param_sync=False)  # as Megatron's trainer for its first step
    compute_gradients(model)
    optimizer.step()
    if gathers_late:
        model.enable_forward_pre_hook()
    return model, optimizer


def gather_for_save(model: Any, optimizer: Any) -> None:
    """Gather the parameters as Megatron's trainer does before each checkpoint."""
    if hasattr(optimizer, "prepare_model_params_for_param_sync"):  # from 0.19 on
        optimizer.prepare_model_params_for_param_sync()
    model.start_param_sync(force_sync=True)


def count_own_weights(model: Any, optimizer: Any) -> tuple[int, int]:
    """Count the weights that a rank keeps for the optimizer, and those of them that the model also has."""
    kept = own = 0
    for part in optimizer.chained_optimizers:
        for weights, shards in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            for weight, shard in zip(weights, shards, strict=True):
                place = part._get_model_param_range_map(weight)["param"]
                kept += 1
                own += torch.equal(weight.view(-1)[place.start : place.end], shard.bfloat16())
    return kept, own
