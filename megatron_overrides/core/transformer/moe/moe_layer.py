"""Mark the parameters of experts with what they are: shards or replicas, and of which process groups.

NVIDIA/Megatron-LM#5916. Three readers depend on the marks: the norms, which count each gradient once
(`tensor_model_parallel`), DDP and the optimizers, which reduce over the ranks that hold replicas (`allreduce`), and
Muon, which puts the shards of a matrix together (`partition_dim`).
"""

from __future__ import annotations

import inspect
import re
from typing import Any

# The dimension along which a linear layer is split over the ranks of its tensor-parallel group.
_COLUMN, _ROW = {"weight": 0, "bias": 0}, {"weight": 1}
_DIMENSIONS = {"linear_fc1": _COLUMN, "linear_fc2": _ROW}
_NUMBERED = re.compile(r"(weight|bias)\d*")  # weight3: of the fourth expert of a grouped layer


def mark_expert_parameters(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps MoELayer.__init__: marks the parameters of its experts.

    TransformerEngine from 2.13 on marks no weight of grouped experts as a shard, and none of its versions marks their
    biases. Megatron reduces the gradients of experts over the data-parallel ranks of the dense layers unless
    `expert_model_parallel_size` is larger than 1; that is wrong as well if experts are split over another
    number of tensor-parallel ranks than dense layers: several of these ranks hold the same expert, or none does.
    """
    wrapped(*args, **kwargs)
    for path, module in instance.experts.named_modules():
        _mark(module, instance.config, _DIMENSIONS.get(path.rpartition(".")[2]))


def mark_column_of_expert(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps ColumnParallelLinear.__init__: marks it if it is of an expert, wherever it is built.

    An adapter that is added to a finished model and a layer of another library are not seen by MoELayer.__init__.
    """
    wrapped(*args, **kwargs)
    if inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("is_expert"):
        _mark(instance, instance.config, _COLUMN)


def mark_row_of_expert(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps RowParallelLinear.__init__: as `mark_column_of_expert`."""
    wrapped(*args, **kwargs)
    if inspect.signature(wrapped).bind(*args, **kwargs).arguments.get("is_expert"):
        _mark(instance, instance.config, _ROW)


def _mark(module: Any, config: Any, dimensions: dict[str, int] | None) -> None:
    """Mark the own parameters of a module of an expert.

    Args:
        dimensions: along which its parameters are split, by kind; None leaves that as it is.
    """
    has_own_groups = (
        config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    )
    for name, param in module.named_parameters(recurse=False):
        param.allreduce = not has_own_groups
        kind = _NUMBERED.fullmatch(name)
        if dimensions and kind:
            _mark_shard(param, dimensions.get(kind[1]))


def _mark_shard(param: Any, dimension: int | None) -> None:
    """Mark `param` as split along `dimension`, or as a replica where that is None."""
    param.tensor_model_parallel = dimension is not None
    if dimension is not None:
        param.partition_dim = dimension
        if not hasattr(param, "partition_stride"):
            param.partition_stride = 1
