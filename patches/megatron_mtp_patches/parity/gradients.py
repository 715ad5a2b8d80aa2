"""The gradients, weights and buffers of a rank, by their names and places.

They are read around a step of the optimizer, gradients and weights before it, buffers after it. Under Megatron's DDP
gradients are those of its buffers, whose shards of the distributed optimizer are gathered first; under FSDP they and
the weights are the optimizer's DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_overrides.model_places import PlacedBuffer, Shard

Parts = dict[str, list[tuple[tuple[int, ...], tuple[int | slice, ...], torch.Tensor]]]


def collect_gradients(model: list[Any], optimizer: Any, shards: list[Shard]) -> Parts:
    """The gradients that the optimizer is about to take, on each rank that has them."""
    sharded = dict(_sharded_values(optimizer, "grad"))
    if not sharded:
        for chunk in model:
            _gather_buffers(chunk)
    values = {}
    for param in {shard.parameter for shard in shards}:
        gradient = sharded.get(param) if sharded else getattr(param, "main_grad", None)
        if gradient is None and not sharded:
            gradient = param.grad
        if gradient is not None:
            values[param] = gradient
    return _by_name(shards, values)


def collect_weights(optimizer: Any, shards: list[Shard]) -> Parts:
    """The weights as they are now."""
    sharded = dict(_sharded_values(optimizer, "data"))
    return _by_name(shards, sharded or {shard.parameter: shard.parameter.data for shard in shards})


def collect_buffers(buffers: list[PlacedBuffer]) -> Parts:
    """The buffers as they are now."""
    parts: Parts = {}
    for one in buffers:
        value = getattr(one.module, one.attribute).detach().float().clone()
        parts.setdefault(one.name, []).append((one.shape, one.region, value))
    return parts


def _by_name(shards: list[Shard], values: dict[torch.nn.Parameter, torch.Tensor]) -> Parts:
    parts: Parts = {}
    for shard in shards:
        if shard.parameter in values:
            part = shard.view(values[shard.parameter].detach()).float().clone()
            parts.setdefault(shard.name, []).append((shard.shape, shard.region, part))
    return parts


def _gather_buffers(chunk: Any) -> None:
    """Give each rank the shards of gradients that the distributed optimizer has left on the others."""
    if not getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False):
        return
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    for group in groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            whole = bucket.grad_data
            shard = whole.chunk(ranks.size())[ranks.rank()].clone()
            torch.distributed.all_gather_into_tensor(whole, shard, group=ranks)


def _sharded_values(optimizer: Any, name: str) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield the parameters that FSDP has sharded, and their whole gradients or values."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.param_groups:
            for sharded in group["params"]:
                if (param := getattr(sharded, "orig_param", None)) is not None:
                    value = getattr(sharded, "decoupled_grad", None) if name == "grad" else sharded
                    whole = _gather(sharded, sharded.grad if value is None else value, param.numel())
                    if whole.numel():
                        yield param, whole.reshape(param.shape)


def _gather(sharded: Any, value: Any, size: int) -> torch.Tensor:
    """All of a flat tensor that data-parallel ranks have shards of; a rank with none has no `value`.

    A shard is a run of the flat parameter, in the order of the ranks. Nothing where no rank has a value.
    """
    local = torch.empty(0) if value is None else value.to_local().detach().flatten()
    for dimension, placement in enumerate(sharded.placements):
        names = sharded.device_mesh.mesh_dim_names or ("",)  # FSDP2 names none
        if not placement.is_replicate() and "tp" not in names[dimension]:
            group = sharded.device_mesh.get_group(dimension)
            pieces: list[Any] = [None] * group.size()
            torch.distributed.all_gather_object(pieces, local, group=group)
            whole = [piece for piece in pieces if piece.numel() == size]
            local = whole[0] if len(whole) > 1 else torch.cat(pieces)  # no_shard calls its copies shards
    return local
