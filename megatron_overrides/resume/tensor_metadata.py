"""The metadata of tensors in a checkpoint of the format torch_dist."""

from __future__ import annotations

import copy
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_overrides.call import Call

# Those that torch.empty takes. Torch 2.15 has `strides` besides (pytorch/pytorch#194251).
_PROPERTIES_OF_EMPTY = {"dtype", "layout", "requires_grad", "memory_format", "pin_memory"}


def with_properties_of_empty(metadata: Metadata) -> Metadata:
    """Return a copy in which each tensor has only those properties that are arguments of torch.empty."""
    reduced = copy.copy(metadata)
    reduced.state_dict_metadata = {
        key: _reduce(stored) if isinstance(stored, TensorStorageMetadata) else stored
        for key, stored in metadata.state_dict_metadata.items()
    }
    return reduced


def _reduce(stored: TensorStorageMetadata) -> TensorStorageMetadata:
    reduced = copy.copy(stored)
    reduced.properties = copy.copy(stored.properties)
    for name in vars(reduced.properties).keys() - _PROPERTIES_OF_EMPTY:
        delattr(reduced.properties, name)
    return reduced


def leave_out_new_tensor_properties(call: Call) -> Any:
    """Wraps TorchDistLoadShardedStrategy.load_tensors_metadata, which passes torch.empty all properties of a tensor."""
    from megatron.core.dist_checkpointing.strategies.torch import _get_filesystem_reader

    metadata = call["metadata"]
    if metadata is None:
        metadata = _get_filesystem_reader(call["checkpoint_dir"]).read_metadata()
    call["metadata"] = with_properties_of_empty(metadata)
    return call.proceed()
