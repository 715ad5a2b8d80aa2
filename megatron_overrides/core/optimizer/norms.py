"""All gradient norms of a step from one reduction.

Upstream (NVIDIA/Megatron-LM#4116) reduces the main norm, then one more for each group, after asking all ranks whether
any of them has that group; a nested LayerWise optimizer reduces its groups over the wrong ranks. Here each rank gives
the same short vector, whatever it owns, to one all-reduce for each set of ranks that share an optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import get_data_parallel_group_if_dtensor, to_local_if_dtensor

from megatron_overrides.core.optimizer.grad_norm_groups import (
    MTP_GRAD_NORM_GROUP,
    SEPARATE_GRAD_NORM_GROUPS,
    check_group,
    get_main_grads_for_grad_norm,
    group_of,
)
from megatron_overrides.core.optimizer.orthogonalized import is_exempt

# A float or, with TransformerEngine >= 2.14 from Megatron 0.17 on, a one-element CUDA tensor.
GradNorm: TypeAlias = float | torch.Tensor


class Norms(NamedTuple):
    """`by_group` has the groups that a parameter on any rank is tagged with.

    `clippable` has the same norms, the main one under None, without the gradients that are exempt from clipping.
    """

    main: GradNorm
    by_group: dict[str, GradNorm]
    clippable: dict[str | None, GradNorm]


class Owned(NamedTuple):
    """What there is on any rank: parameters of these groups; leaves that are clipped, and leaves that are exempt."""

    groups: list[str]
    clippable: bool
    exempt: bool


NOBODY = "nobody"

# What is summed over the ranks: the squares of the norms, main one first, of what may be clipped and of what is exempt;
# then how many leaves own each group, and how many are clippable and exempt.
_GROUPS: tuple[str | None, ...] = (None, *SEPARATE_GRAD_NORM_GROUPS)
_CLIPPABLE = slice(0, len(_GROUPS))
_EXEMPT = slice(len(_GROUPS), 2 * len(_GROUPS))
_OWNERS = slice(_EXEMPT.stop, _EXEMPT.stop + len(SEPARATE_GRAD_NORM_GROUPS))
_LEAVES = slice(_OWNERS.stop, _OWNERS.stop + 2)


class Reduction(NamedTuple):
    """Leaves of an optimizer tree whose norms are summed over the same ranks (None: over all, NOBODY: over none)."""

    ranks: Any
    leaves: list[Any]


def reductions(optimizer: Any) -> list[Reduction]:
    """The leaves of `optimizer` by the ranks that share them, in an order that is the same on those ranks."""
    found: dict[Any, Reduction] = {}
    for ranks, leaf in _leaves(optimizer, over_all_ranks=False):
        if ranks not in (None, NOBODY) and ranks.size() == torch.distributed.get_world_size():
            ranks = None
        leaves = found.setdefault(ranks, Reduction(ranks, [])).leaves
        if leaf is not None:
            leaves.append(leaf)
    return list(found.values())


def _leaves(optimizer: Any, over_all_ranks: bool) -> Iterator[tuple[Any, Any]]:
    """(ranks, leaf) for each leaf; leaf None where this rank has none, but takes part."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    # LayerWise deals whole parameters out to ranks, so its norm is a sum over all of them.
    over_all_ranks = over_all_ranks or isinstance(optimizer, LayerWiseDistributedOptimizer)
    is_chain = hasattr(optimizer, "chained_optimizers")
    if not is_chain or not optimizer.chained_optimizers:
        # An optimizer of somebody else's may know no ranks, only a norm.
        own_ranks = getattr(optimizer, "get_grad_stats_parallel_group", lambda: NOBODY)
        yield None if over_all_ranks else own_ranks(), None if is_chain else optimizer
        return
    for child in optimizer.chained_optimizers:
        yield from _leaves(child, over_all_ranks)


@torch.no_grad()
def measure(optimizer: Any) -> Norms:
    """Every norm of the gradients of `optimizer`, however nested. A collective: all its ranks must come here."""
    sums = _sum(reductions(optimizer), optimizer)
    if not hasattr(optimizer, "_owned"):
        # Once, because it does not change and the numbers may be on the device.
        owners = zip(SEPARATE_GRAD_NORM_GROUPS, sums[_OWNERS], strict=True)
        groups = [group for group, number in owners if number > 0]
        optimizer._owned = Owned(groups, *(bool(number > 0) for number in sums[_LEAVES]))
    squares = {
        group: (square, square + exempt)
        for group, square, exempt in zip(_GROUPS, sums[_CLIPPABLE], sums[_EXEMPT], strict=True)
        if group is None or group in optimizer._owned.groups
    }
    return Norms(
        main=squares[None][1] ** 0.5,
        by_group={group: whole**0.5 for group, (_, whole) in squares.items() if group is not None},
        clippable={group: square**0.5 for group, (square, _) in squares.items()},
    )


def _sum(found: list[Reduction], root: Any) -> list[Any]:
    """The slots, see _CLIPPABLE, summed over `found`, which are leaves of `root`."""
    sums: Any = torch.stack([_reduce(reduction, root) for reduction in found])
    if getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is not None:
        sums = list(sums.sum(dim=0).split(1))
    else:
        sums = [sum(column) for column in zip(*sums.tolist(), strict=True)]  # the one wait for the device
    for reduction in found:
        for leaf in reduction.leaves:
            if leaf is not root and measures_itself(leaf):
                slot = (_EXEMPT if is_exempt(leaf) else _CLIPPABLE).start
                sums[slot] = sums[slot] + (leaf.get_grad_norm() or 0.0) ** 2
    return sums


def _reduce(reduction: Reduction, root: Any) -> torch.Tensor:
    """float32 vector, see _CLIPPABLE: sums over the ranks of `reduction`; `root` is what is being measured."""
    sums = torch.zeros(_LEAVES.stop, dtype=torch.float32, device="cuda")
    grads: list[list[torch.Tensor]] = [[] for _ in range(_EXEMPT.stop)]
    owned = getattr(root, "_owned", None)  # known after the first time
    for leaf in reduction.leaves:
        first = (_EXEMPT if is_exempt(leaf) else _CLIPPABLE).start
        sums[_LEAVES.start + is_exempt(leaf)] += 1
        if leaf is root or not measures_itself(leaf):
            grads[first] += _main_grads(leaf)
        for place, group in enumerate(SEPARATE_GRAD_NORM_GROUPS):
            if (owned is None or group in owned.groups) and _owns(leaf, group):
                sums[_OWNERS.start + place] += 1
                grads[first + 1 + place] += leaf.get_grads_for_grad_norm(group)
    shards = None
    for slot, of_slot in enumerate(grads):
        for grad in of_slot:
            shards = get_data_parallel_group_if_dtensor(grad, shards)
        if of_slot:
            local = [to_local_if_dtensor(grad) for grad in of_slot]
            overflow = torch.zeros(1, dtype=torch.int, device="cuda")
            norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [local], False)
            sums[slot : slot + 1] = norm**2.0
    if shards is not None:
        torch.distributed.all_reduce(sums, group=shards)
    if reduction.ranks is not NOBODY:
        torch.distributed.all_reduce(sums, group=reduction.ranks)
    return sums


def measures_itself(leaf: Any) -> bool:
    """Whether a class of somebody else's has a main norm of its own making."""
    return inspect.getattr_static(type(leaf), "get_grad_norm", get_grad_norm) is not get_grad_norm


def _main_grads(leaf: Any) -> list[torch.Tensor]:
    """Somebody else's class may choose its gradients, under the name that the method had up to 0.18."""
    ours = get_main_grads_for_grad_norm
    chosen = inspect.getattr_static(type(leaf), "get_main_grads_for_grad_norm", ours) is not ours
    return leaf.get_main_grads_for_grad_norm() if chosen else leaf.get_grads_for_grad_norm()


def _owns(leaf: Any, group: str) -> bool:
    return any(group_of(param) == group for param in leaf.get_parameters())


# -- methods of MegatronOptimizer, ChainedOptimizer and LayerWiseDistributedOptimizer ---------------------------------


def get_grad_norm(self: Any) -> GradNorm:
    """The norm of all gradients but those of separate groups, over all ranks; fills `grad_norms_by_group` as well."""
    norms = measure(self)
    self.grad_norms_by_group = norms.by_group
    self.clippable_grad_norms = norms.clippable
    return norms.main


def _compute_grad_norms_by_group(self: Any) -> dict[str, GradNorm]:
    """The norm of each separate group that any rank has parameters of, over all ranks."""
    norms = measure(self)
    self.grad_norms_by_group = norms.by_group
    self.clippable_grad_norms = norms.clippable
    if norms.clippable[None] == norms.main:
        del self.clippable_grad_norms[None]  # nothing is exempt: the main norm is whatever get_grad_norm says
    return self.grad_norms_by_group


def _get_grad_norm_over(self: Any, optimizers: list[Any]) -> GradNorm:
    """The main norm of some of `chained_optimizers`. A collective, with the same choice on all ranks."""
    chosen = {id(leaf) for optimizer in optimizers for _, leaf in _leaves(optimizer, over_all_ranks=False)}
    found = [Reduction(ranks, [leaf for leaf in all_ if id(leaf) in chosen]) for ranks, all_ in reductions(self)]
    sums = _sum(found, self)
    return (sums[_CLIPPABLE.start] + sums[_EXEMPT.start]) ** 0.5


def has_grad_norm_group(self: Any, grad_norm_group: str) -> bool:
    """Whether any rank has a parameter of this group. A collective at the first call."""
    check_group(grad_norm_group)
    known = vars(self).setdefault("_has_grad_norm_group_cache", {})
    if grad_norm_group not in known:
        flag = torch.zeros(1, dtype=torch.int, device="cuda")
        for reduction in reductions(self):
            flag += any(_owns(leaf, grad_norm_group) for leaf in reduction.leaves)
            if reduction.ranks is not NOBODY:
                torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=reduction.ranks)
        known[grad_norm_group] = bool(flag.item())
    return known[grad_norm_group]


@property  # type: ignore[misc]
def mtp_grad_norm(self: Any) -> GradNorm | None:
    """The norm of the MTP heads' gradients in the last step; None if they have no norm of their own."""
    return getattr(self, "grad_norms_by_group", {}).get(MTP_GRAD_NORM_GROUP)
