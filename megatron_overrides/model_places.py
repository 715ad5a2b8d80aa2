"""Where the parameters and buffers of a rank are in the checkpoint of the whole model.

Names and places are those of Megatron's sharded_state_dict: no layout changes them, and tensors of two ranks that have
the same name and place are copies.
"""

from __future__ import annotations

from bisect import bisect_right
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
        strides: size, stride and offset of the part in the parameter's memory; a quantized one has none.
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


class _Memory:
    """Finds what owns a piece of memory. Parameters of a buffer share one storage, so their addresses decide."""

    def __init__(self, owners: Iterator[tuple[torch.Tensor, Any]]) -> None:
        has_memory = ((tensor, owner) for tensor, owner in owners if tensor.numel() and not is_quantized(tensor))
        pieces = {tensor.data_ptr(): (tensor, owner) for tensor, owner in has_memory}
        self._starts = sorted(pieces)
        self._pieces = pieces

    def find(self, tensor: torch.Tensor) -> Any:
        """The owner of the tensor in which this one, a view of it or itself, lies; None for none."""
        if not tensor.numel() or is_quantized(tensor):
            return None
        number = bisect_right(self._starts, tensor.data_ptr()) - 1
        if number < 0:
            return None
        start = self._starts[number]
        owned, owner = self._pieces[start]
        is_inside = tensor.data_ptr() < start + owned.numel() * owned.element_size()
        return owner if is_inside and owned.device == tensor.device else None


def is_quantized(tensor: torch.Tensor) -> bool:
    """True for a parameter of a class of TransformerEngine or torchao, whose memory is that of tensors in it."""
    return type(tensor.data) is not torch.Tensor


def place(model: torch.nn.Module) -> Placement:
    """Find the places of the parameters and buffers of a model, without its wrappers."""
    parameters = _Memory((param.data, param) for param in model.parameters())
    buffers = _Memory(
        (buffer, (module, name)) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
    )
    quantized = {id(param): param for param in model.parameters() if is_quantized(param)}
    placement = Placement([], [], [])
    for tensor in _sharded_tensors(_sharded_state(model)):
        where = str(tensor.key), tuple(tensor.global_shape), _region(tensor)
        if id(tensor.data) in quantized:  # Megatron saves it as it is
            placement.shards.append(Shard(*where, quantized[id(tensor.data)], ((), (), 0)))
        elif (param := parameters.find(tensor.data)) is not None:
            offset = tensor.data.storage_offset() - param.data.storage_offset()
            strides = tuple(tensor.data.size()), tensor.data.stride(), offset
            placement.shards.append(Shard(*where, param, strides))
        elif (owner := buffers.find(tensor.data)) is not None:
            placement.buffers.append(PlacedBuffer(*where, *owner))
    placed = {id(shard.parameter) for shard in placement.shards}
    placement.unplaced.extend(name for name, param in model.named_parameters() if id(param) not in placed)
    return placement


def _sharded_state(model: Any) -> Any:
    """Megatron's sharded_state_dict; that of each part where the model's own asserts what does not hold.

    It does so for tied embeddings with MTP heads on another pipeline stage, whose output layer has an unused weight.
    The data-parallel group is the model's, because a framework may have initialized none in parallel_state.
    """
    group = getattr(getattr(model, "pg_collection", None), "dp_cp", None)
    metadata = {"dp_cp_group": group} if group else None
    try:
        return model.sharded_state_dict(metadata=metadata)
    except AssertionError:
        unused = "output_layer" if model.share_embeddings_and_output_weights else ""
        parts = ((name, part) for name, part in model.named_children() if name != unused)
        return [
            part.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
            for name, part in parts
            if hasattr(part, "sharded_state_dict")
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
