"""The marks by which Megatron tells a shard of tensor parallelism from a replica, where layers set none or wrong ones.

NVIDIA/Megatron-LM#4084: layers mark their weights as shards only while they initialize them.

NVIDIA/Megatron-LM#3213: layers that each tensor-parallel rank has whole mark their weights as shards.
"""

from __future__ import annotations

from typing import Any

from megatron_overrides.call import Call


def mark_shard(param: Any, dimension: int | None) -> None:
    """Mark `param` as split along `dimension` over tensor-parallel ranks, or as a replica where that is None."""
    param.tensor_model_parallel = dimension is not None
    if dimension is not None:
        param.partition_dim = dimension
        if not hasattr(param, "partition_stride"):
            param.partition_stride = 1


def mark_uninitialized_rows(call: Call) -> None:
    """Wraps VocabParallelEmbedding.__init__ and ColumnParallelLinear.__init__, with shards of [rows / TP, ...]."""
    _mark_uninitialized_shard(call, 0)


def mark_uninitialized_columns(call: Call) -> None:
    """Wraps RowParallelLinear.__init__, whose weight is [rows, columns / TP]."""
    _mark_uninitialized_shard(call, 1)


def _mark_uninitialized_shard(call: Call, dimension: int) -> None:
    """Mark the weight as a shard where the layer, which does so as it initializes it, does not initialize it."""
    call.proceed()
    weight = call.instance.weight
    if weight is not None and not call["config"].perform_initialization:
        mark_shard(weight, dimension)
        weight.partition_stride = call.get("stride", 1)


def mark_duplicated_weights(call: Call) -> None:
    """Wraps TELinear.__init__: weights of a duplicated layer are copies, but TransformerEngine marks them as shards."""
    call.proceed()
    if call["parallel_mode"] == "duplicated":
        for param in call.instance.parameters():
            mark_shard(param, None)
