"""Scaling the rows of a weight that an optimizer trains: the model's, and what the optimizer keeps of it in fp32.

A main weight is whole (Float16OptimizerWithFloat16Params, also of a layer-wise optimizer, on the rank that owns it), a
flat shard (DistributedOptimizer), a state of a precision-aware optimizer, a copy on the CPU, or the model's own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

# All that exist: a parameter, and a shard of it, do not tell which DistributedOptimizer has them.
_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def remember(optimizer: Any) -> None:
    """Keep an optimizer, so that the shards of parameters that it has can be scaled."""
    _optimizers.add(optimizer)


def scale_rows(param: torch.nn.Parameter, factors: torch.Tensor) -> None:
    """Multiply row i of `param`, [rows] or [rows, columns], and of its main weight by factors[i]; not if it is frozen.

    Raises:
        ValueError: its main weight has another shape and no known place in it.
    """
    if not param.requires_grad:
        return
    column = factors.view(-1, *[1] * (param.ndim - 1))
    for optimizer in _optimizers:
        if param in getattr(optimizer, "model_param_group_index_map", {}):
            _scale_shard(optimizer, param, column)
            return
    main = getattr(param, "main_param", None)
    if main is not None and main.shape != param.shape:
        raise ValueError(
            f"--qk-clip: the main weight of a parameter of shape {list(param.shape)} has the shape {list(main.shape)}, "
            "and no DistributedOptimizer that was created since the import of megatron_mtp_patches has it. Import "
            "megatron_mtp_patches before the optimizer is created"
        )
    param.data.mul_(column)
    if main is not None and not _same_memory(main, param):
        main.data.mul_(column)


def _scale_shard(optimizer: Any, param: torch.nn.Parameter, column: torch.Tensor) -> None:
    place = optimizer._get_model_param_range_map(param)["param"]
    factors = column.expand_as(param).reshape(-1)[place.start : place.end]
    group_index, order = optimizer.model_param_group_index_map[param]
    inner = optimizer.optimizer
    shard = inner.param_groups[group_index]["params"][order]
    is_offloaded = hasattr(inner, "param_to_inner_param")
    main = None if is_offloaded else inner.state.get(shard, {}).get("master_param")
    exact = None  # the fp32 numbers that the model's bf16 numbers and remainders are
    if main is not None and main.dtype == torch.int16:
        exact = _join(param.data.view(-1)[place.start : place.end], main)
    param.data.mul_(column)
    copies = [shard, inner.param_to_inner_param[shard]] if is_offloaded else [shard]
    for copy in {id(one): one for one in copies}.values():
        if not _same_memory(copy, param):
            copy.data.mul_(factors.to(copy.device))
    if main is not None and exact is not None:
        main.copy_(_split(param.data.view(-1)[place.start : place.end], exact * factors))
    elif main is not None:
        unscaled = inner.get_unscaled_state(shard, "master_param") * factors
        inner.set_scaled_state(shard, "master_param", unscaled)


def _same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if one is a view of the other. Quantized weights of TransformerEngine have no data pointer to compare."""
    return bool(torch._C._is_alias_of(tensor, other))


def _join(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers of which the model has the bf16 numbers `high`, and the optimizer the rest, as int16.

    TransformerEngine's FusedAdam with store_param_remainders: as integers, they are high * 2^16 + remainder.
    """
    return ((high.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def _split(high: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The remainders of fp32 `numbers`; those that do not round to `high` become the nearest that does."""
    remainder = numbers.view(torch.int32) - (high.view(torch.int16).int() << 16)
    return remainder.clamp(-(2**15), 2**15 - 1).short()
