"""Code that reproductions of Megatron-FSDP share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .lab import (
    LENGTH,
    compute_gradients,
    gather,
    make_config,
    make_ddp,
    make_gpt,
    make_optimizer,
    norm,
    start,
    sum_over_ranks,
    tokens,
)


def make_fsdp(config: Any, module: Any, units: list[type] | None = None, **settings: Any) -> Any:
    """`module` in Megatron-FSDP that shards parameters, gradients and optimizer state unless `settings` say otherwise.

    Its `units` are gathered one by one; None for Megatron's choice, the layers of a transformer.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    defaults: dict[str, Any] = {"use_distributed_optimizer": True, "use_megatron_fsdp": True}
    defaults |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
    defaults |= {"data_parallel_sharding_strategy": "optim_grads_params"}
    ddp_config = DistributedDataParallelConfig(**(defaults | settings))
    return FullyShardedDataParallel(config, ddp_config, module, fsdp_unit_modules=units)


def train_gpt(strategy: str, instances: int = 1, **sizes: int) -> tuple[Any, float]:
    """The optimizer of a small GPT after a backward pass, and how many gradients one copy of the model has.

    With `expert_model_parallel_size` or `expert_tensor_parallel_size` it has two experts in each layer. With several
    `instances` each shards over its own ranks.
    """
    from megatron.core import parallel_state

    experts = {"num_moe_experts": 2, "add_bias_linear": False} if any("expert" in size for size in sizes) else {}
    config = make_config(sequence_parallel=sizes.get("tensor_model_parallel_size", 1) > 1, **experts, **sizes)
    gpt = make_gpt(config, transformer_engine=True)
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    own_share = 0.0  # of this rank, in the number of all gradients
    for name, param in gpt.named_parameters():
        if ".experts." in name:
            replicas = parallel_state.get_expert_data_parallel_world_size()
        else:
            is_split = getattr(param, "tensor_model_parallel", False)
            replicas = parallel_state.get_data_parallel_world_size() * (1 if is_split else tensor_parallel)
        own_share += param.numel() / replicas
    settings: dict[str, Any] = {"num_distributed_optimizer_instances": instances}
    model = make_fsdp(config, gpt, data_parallel_sharding_strategy=strategy, **settings)
    optimizer = make_optimizer(model, use_distributed_optimizer=True)
    compute_gradients(model)
    return optimizer, sum_over_ranks(own_share)


def shard_over_instances(outer_strategy: str, overlaps: bool = True) -> tuple[Any, Any]:
    """A small GPT, and an equal one under Megatron-FSDP with two optimizer instances.

    Args:
        outer_strategy: whether the instances share out the optimizer state ("optim") or not ("no_shard").
        overlaps: whether communication overlaps, of which Megatron's trainer tells the schedule.
    """
    start(num_distributed_optimizer_instances=2)
    config = make_config(gradient_accumulation_fusion=False)
    gpt = make_gpt(config)
    torch.manual_seed(1)
    settings: dict[str, Any] = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer_strategy}
    settings |= {"overlap_grad_reduce": overlaps, "overlap_param_gather": overlaps}
    model = make_fsdp(config, make_gpt(config), **settings)
    config.no_sync_func = model.no_sync if overlaps else None
    return gpt, model


def norms_over_instances(outer_strategy: str, overlaps: bool = True) -> tuple[float, float]:
    """The gradient norms of a small GPT and of an equal one under Megatron-FSDP, on four ranks with the same data."""
    gpt, model = shard_over_instances(outer_strategy, overlaps)
    ids, positions = tokens()
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    gpt(ids, positions, mask, labels=ids.roll(-1, 1)).mean().backward()
    compute_gradients(model)
    copies = 1 if outer_strategy == "optim" else 2
    sharded = (sum_over_ranks(norm(*local_gradients(model)) ** 2) / copies) ** 0.5
    return norm(*(param.grad for param in gpt.parameters())), sharded


def norm_without_sharding(**sizes: int) -> tuple[list[float], list[float]]:
    """The norm of all gradients of a small model, and what no_shard gives on each rank, where each gradient is 1."""
    start(**sizes)
    optimizer, gradients = train_gpt("no_shard", **sizes)
    for param in optimizer.get_parameters():
        param.grad._local_tensor.fill_(1.0)
    _, seen, _ = optimizer.step()
    norms = gather(float(seen))
    return [gradients**0.5] * len(norms), norms


def norms_of_a_step(
    strategy: str = "optim_grads_params",
    microbatches: int = 1,
    part: str = "",
    is_fused: bool = False,
    is_tied: bool = False,
    expert_ranks: int = 1,
    has_no_sync: bool = True,
    sharding: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[float, float]:
    """The gradient norms of a GPT's parameters with `part` in their names, under DDP and under Megatron-FSDP.

    Each step has so many equal microbatches. Each rank has tokens of its own.

    Args:
        is_fused: whether backward passes of FSDP add weight gradients to `main_grad` themselves.
        is_tied: whether the word embedding is the output weight.
        expert_ranks: the expert-parallel ranks; with several there are two experts in each layer.
        has_no_sync: whether the schedule calls FSDP's no_sync(), as Megatron's trainer tells it where reductions
            overlap.
        sharding: further settings of FSDP.
    """
    start(expert_model_parallel_size=expert_ranks)
    if expert_ranks > 1:
        experts = {"num_moe_experts": 2, "add_bias_linear": False, "expert_model_parallel_size": expert_ranks}
        settings = {**settings, **experts}
    chosen: dict[str, Any] = {"data_parallel_sharding_strategy": strategy, **(sharding or {})}
    norms = []
    for is_sharded in (False, True):
        torch.manual_seed(1)
        config = make_config(gradient_accumulation_fusion=is_fused and is_sharded, **settings)
        gpt = make_gpt(config, transformer_engine=True, share_embeddings_and_output_weights=is_tied)
        replicas = torch.distributed.get_world_size() // (expert_ranks if "experts" in part else 1)
        if is_sharded:
            model = make_fsdp(config, gpt, **chosen)
            model.config.no_sync_func = model.no_sync if has_no_sync else None
            replicas = replicas if strategy == "no_shard" else 1
        else:
            model = make_ddp(config, gpt)
        compute_gradients(model, microbatches, tokens()[0].roll(torch.distributed.get_rank()))
        if is_sharded:
            grads = local_gradients(model, part)
        else:
            grads = [param.main_grad for name, param in model.named_parameters() if part in name]
        norms.append((sum_over_ranks(norm(*grads) ** 2) / replicas) ** 0.5)
    return norms[0], norms[1]


def local_gradients(model: Any, part: str = "") -> list[Any]:
    """This rank's part of the gradients under Megatron-FSDP, of parameters with `part` in their names."""
    named = model.module.param_and_grad_buffer.optimizer_named_parameters
    return [param.grad._local_tensor for name, param in named if part in name and param.grad is not None]


class Step(NamedTuple):
    """The norm of what a step changes, and how many gradients are 0."""

    update: float
    zeros: int


def step_in_bf16(is_precision_aware: bool, **model_settings: Any) -> Step:
    """A step of a GPT that is the same each time; `model_settings` are those of its TransformerConfig."""
    from megatron.core.distributed import DistributedDataParallelConfig

    torch.manual_seed(1)
    field = "megatron_fsdp_use_decoupled_grad"  # from 0.18 on; the trainer sets it
    settings: dict[str, Any] = {field: is_precision_aware} if hasattr(DistributedDataParallelConfig, field) else {}
    config = make_config(bf16=True, params_dtype=torch.bfloat16, **model_settings)
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
