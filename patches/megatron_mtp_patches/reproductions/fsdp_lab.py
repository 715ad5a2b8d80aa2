"""What reproductions of Megatron-FSDP share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .lab import compute_gradients, make_config, make_ddp, make_gpt, make_optimizer, norm, sum_over_ranks


def make_fsdp(config: Any, module: Any, units: list[type] | None = None, **settings: Any) -> Any:
    """`module` in Megatron-FSDP that shards parameters, gradients and optimizer state.

    Its `units` are gathered one by one; None for Megatron's choice, the layers of a transformer.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        **settings,
    )
    return FullyShardedDataParallel(config, ddp_config, module, fsdp_unit_modules=units)


def norm_under_ddp_and_fsdp(part: str, **settings: Any) -> tuple[float, float]:
    """The gradient norms of a GPT's parameters with `part` in their names; FSDP's backward pass adds them up itself."""
    norms = []
    for wrap, is_fused in ((make_ddp, False), (make_fsdp, True)):
        torch.manual_seed(1)
        config = make_config(gradient_accumulation_fusion=is_fused, **settings)
        model = wrap(config, make_gpt(config, transformer_engine=True))
        compute_gradients(model)
        if is_fused:
            named = model.module.param_and_grad_buffer.optimizer_named_parameters
            grads = [param.grad._local_tensor for name, param in named if part in name and param.grad is not None]
            norms.append(sum_over_ranks(norm(*grads) ** 2) ** 0.5)
        else:
            norms.append(norm(*(param.main_grad for name, param in model.named_parameters() if part in name)))
    return norms[0], norms[1]


class Step(NamedTuple):
    """The norm of what a step changes, and how many gradients are 0."""

    update: float
    zeros: int


def step_in_bf16(is_precision_aware: bool) -> Step:
    """A step of a GPT that is the same each time."""
    from megatron.core.distributed import DistributedDataParallelConfig

    torch.manual_seed(1)
    field = "megatron_fsdp_use_decoupled_grad"  # from 0.18 on; the trainer sets it
    settings: dict[str, Any] = {field: is_precision_aware} if hasattr(DistributedDataParallelConfig, field) else {}
    config = make_config(bf16=True, params_dtype=torch.bfloat16)
    model = make_fsdp(config, make_gpt(config).bfloat16(), **settings)
    optimizer = make_optimizer(
        model,
        bf16=True,
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=is_precision_aware,
        clip_grad=0.0,
        log_num_zeros_in_grad=True,
    )
    shards = [param._local_tensor for _, param in model.module.param_and_grad_buffer.optimizer_named_parameters]
    before = [shard.clone() for shard in shards]
    compute_gradients(model)
    _, _, zeros = optimizer.step()
    update = [shard - old for shard, old in zip(shards, before, strict=True)]
    return Step(sum_over_ranks(norm(*update) ** 2) ** 0.5, int(zeros))
