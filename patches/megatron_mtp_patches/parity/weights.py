"""Weights that depend on their names and global coordinates alone, and where a rank's shards of them are.

Names and places are those of Megatron's sharded_state_dict: no cut of the model changes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Shard(NamedTuple):
    """A part of a weight that a parameter of this rank holds.

    Attributes:
        name: of the weight in a checkpoint.
        shape: of the whole weight.
        region: where the part is in it; an index of the whole weight.
        parameter: what holds it.
        strides: size, stride and offset of the part in the parameter's memory.
    """

    name: str
    shape: tuple[int, ...]
    region: tuple[int | slice, ...]
    parameter: torch.nn.Parameter
    strides: tuple[tuple[int, ...], tuple[int, ...], int]

    def view(self, values: torch.Tensor) -> torch.Tensor:
        """The part of `values`, which has the form of the parameter, in the form of its region."""
        size, stride, offset = self.strides
        return values.contiguous().as_strided(size, stride, values.storage_offset() + offset)


class PlacedBuffer(NamedTuple):
    """A buffer of this rank that a checkpoint has, whole or a part.

    Attributes:
        name, shape, region: as of a shard.
        module: where the buffer is, under `attribute`; casts of a model put another tensor there.
        attribute: see `module`.
    """

    name: str
    shape: tuple[int, ...]
    region: tuple[int | slice, ...]
    module: torch.nn.Module
    attribute: str


class Placement(NamedTuple):
    """Where the state of a model is in its checkpoint.

    Attributes:
        shards: of its parameters.
        buffers: those that are saved.
        unplaced: the names of parameters without a place.
    """

    shards: list[Shard]
    buffers: list[PlacedBuffer]
    unplaced: list[str]


def place(model: torch.nn.Module) -> Placement:
    """Find the places of the parameters and buffers of a model."""
    parameters = {param.data.untyped_storage().data_ptr(): param for param in model.parameters()}
    owners = {
        buffer.untyped_storage().data_ptr(): (module, name)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    }
    placement = Placement([], [], [])
    for tensor in _sharded_tensors(_sharded_state(model)):
        memory = tensor.data.untyped_storage().data_ptr()
        where = str(tensor.key), tuple(tensor.global_shape), _region(tensor)
        if (param := parameters.get(memory)) is not None:
            offset = tensor.data.storage_offset() - param.data.storage_offset()
            strides = tuple(tensor.data.size()), tensor.data.stride(), offset
            placement.shards.append(Shard(*where, param, strides))
        elif memory in owners:
            placement.buffers.append(PlacedBuffer(*where, *owners[memory]))
    placed = {id(shard.parameter) for shard in placement.shards}
    placement.unplaced.extend(name for name, param in model.named_parameters() if id(param) not in placed)
    return placement


def _sharded_state(model: Any) -> Any:
    """Megatron's sharded_state_dict; that of each part where the model's own asserts what does not hold.

    It does so for tied embeddings with MTP heads on another pipeline stage, whose output layer has an unused weight.
    """
    try:
        return model.sharded_state_dict()
    except AssertionError:
        unused = "output_layer" if model.share_embeddings_and_output_weights else ""
        parts = ((name, part) for name, part in model.named_children() if name != unused)
        return [
            part.sharded_state_dict(prefix=f"{name}.") for name, part in parts if hasattr(part, "sharded_state_dict")
        ]


def _sharded_tensors(state: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in nested_values(state) if isinstance(state, (dict, list)) else [state]:
        if isinstance(value, ShardedTensorFactory):
            yield from _sharded_tensors(value.build())
        elif isinstance(value, ShardedTensor) and value.data is not None:
            yield value


def _region(tensor: Any) -> tuple[int | slice, ...]:
    axes = tensor.prepend_axis_num
    offsets, sizes = tensor.global_offset[axes:], tensor.local_shape
    parts = (slice(int(start), int(start + size)) for start, size in zip(offsets, sizes, strict=True))
    return (*map(int, tensor.global_offset[:axes]), *parts)


def fill(shards: list[Shard], centered_norms: bool, draw: int, step: float = 0.0) -> None:
    """Give each shard its part of the weight of its name.

    Args:
        centered_norms: the weights of norms are added to 1 (--apply-layernorm-1p).
        draw: which of the random weights of these names.
        step: each entry is multiplied by a random number from 1 - step to 1 + step; other steps have other numbers.
    """
    with torch.no_grad():
        for shard in shards:
            whole = make_weight(shard.name, shard.shape, centered_norms, draw)
            if step:
                generator = torch.Generator().manual_seed(zlib.crc32(f"{shard.name} {step}".encode()))
                whole = whole * (1 + step * (2 * torch.rand(whole.shape, generator=generator) - 1))
            part = shard.view(shard.parameter.data)
            part.copy_(whole[shard.region].reshape(part.shape))


def make_weight(name: str, shape: tuple[int, ...], centered_norms: bool, draw: int = 0) -> torch.Tensor:
    """The whole weight of this name, in float32."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {draw}".encode()))
    values = torch.randn(shape, generator=generator)
    if "A_log" in name:  # of a Mamba or GatedDeltaNet layer: its exponential is a decay
        return 0.3 * values.abs()
    if name.endswith(("bias", ".D")):
        return 0.1 * values
    if "norm" in name:
        return 0.1 * values if centered_norms else 1 + 0.2 * values
    return (0.5 if "router" in name else 0.15) * values
