"""The one walk over a tree of optimizers: chains, LayerWiseDistributedOptimizer and MimoOptimizer nest them.

Measuring, clipping, skipping and counting zeros use it: for the leaves, the process groups over which their norms are
summed, and the parameters of a leaf by norm group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch

from megatron_overrides.norms.groups import Group, measured_group, separate_groups
from megatron_overrides.norms.values import Census


class Leaf(NamedTuple):
    """An optimizer that owns parameters, or a chain that is empty on this rank but takes part in its reductions.

    `over_all_ranks`: LayerWise deals whole parameters out to ranks, so its norms are sums over all of them.
    """

    optimizer: Any
    owns_parameters: bool
    over_all_ranks: bool


class ReduceOver(Enum):
    """Process groups that are not named by a handle."""

    ALL_RANKS = "all ranks"
    THIS_RANK = "this rank"  # an optimizer of another library may have get_grad_norm, but no process group


class Reduction(NamedTuple):
    """The leaf optimizers whose squared norms are summed over one process group, or over what ReduceOver names."""

    group: Any
    optimizers: list[Any]

    def all_reduce(self, tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> None:
        if self.group is not ReduceOver.THIS_RANK:
            group = None if self.group is ReduceOver.ALL_RANKS else self.group
            torch.distributed.all_reduce(tensor, op=op, group=group)


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError unless `optimizer` is one of Megatron's kind, which can be chained."""
    if not hasattr(optimizer, "get_grad_norm"):
        raise TypeError(
            f"{type(optimizer).__name__} is not a Megatron optimizer: pass what get_megatron_optimizer returned"
        )


def leaves(optimizer: Any) -> Iterator[Any]:
    """The optimizers below `optimizer`, or itself, that own parameters."""
    return (leaf.optimizer for leaf in _walk(optimizer, over_all_ranks=False) if leaf.owns_parameters)


def is_exempt(leaf: Any) -> bool:
    """True if the gradients of `leaf` are not clipped, and count in the norms that clip and skip only if NaN or inf."""
    return getattr(leaf, "skip_grad_norm_clip", False) is True  # a mock has every attribute, but not this value


def reductions(optimizer: Any) -> list[Reduction]:
    """The leaves of `optimizer` by the process group that shares them, in an order that is the same on its ranks."""
    by_process_group: dict[Any, Reduction] = {}
    for leaf in _walk(optimizer, over_all_ranks=False):
        group = _process_group(leaf)
        reduction = by_process_group.setdefault(group, Reduction(group, []))
        if leaf.owns_parameters:
            reduction.optimizers.append(leaf.optimizer)
    return list(by_process_group.values())


def params_by_group(leaf: Any, groups: Collection[str]) -> dict[Group, list[torch.nn.Parameter]]:
    """The parameters of `leaf` by the norm that clips them: one of these separate `groups`, or the main one (None).

    Raises:
        ValueError: a parameter is tagged with another group, so its gradient would enter no norm.
    """
    params = [] if getattr(leaf, "is_stub_optimizer", False) else leaf.get_parameters()
    by_group: dict[Group, list[torch.nn.Parameter]] = {}
    for param in params:
        by_group.setdefault(measured_group(param, groups), []).append(param)
    return by_group


def params_to_clip(leaf: Any, census: Census | None) -> dict[Group, list[torch.nn.Parameter]]:
    """params_by_group in a step with this census; where that has no separate group, no parameter is asked."""
    if census is not None and len(census.groups) == 1:
        params = leaf.get_parameters()
        return {None: params} if params else {}
    return params_by_group(leaf, separate_groups(leaf.config))


def _walk(optimizer: Any, over_all_ranks: bool) -> Iterator[Leaf]:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    over_all_ranks = over_all_ranks or isinstance(optimizer, LayerWiseDistributedOptimizer)
    for name in ("chained_optimizers", "_active_optimizers"):
        if hasattr(optimizer, name):
            children = list(getattr(optimizer, name))
            for child in children:
                yield from _walk(child, over_all_ranks)
            if not children:
                yield Leaf(optimizer, owns_parameters=False, over_all_ranks=over_all_ranks)
            return
    yield Leaf(optimizer, owns_parameters=True, over_all_ranks=over_all_ranks)


def _process_group(leaf: Leaf) -> Any:
    if leaf.over_all_ranks:
        return ReduceOver.ALL_RANKS
    if not hasattr(leaf.optimizer, "get_grad_stats_parallel_group"):
        return ReduceOver.THIS_RANK
    group = leaf.optimizer.get_grad_stats_parallel_group()
    if group is None or group.size() == torch.distributed.get_world_size():
        return ReduceOver.ALL_RANKS
    return group
