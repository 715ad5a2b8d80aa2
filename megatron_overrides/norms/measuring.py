"""All gradient norms of a step from one reduction.

Upstream (NVIDIA/Megatron-LM#4116) reduces the main norm, then one more for each group, after asking all ranks whether
any of them has that group; a nested LayerWise optimizer reduces its groups over the wrong ranks. Here each rank gives
the same small tensor, whatever it owns, to one all-reduce for each process group that shares an optimizer.
"""

from __future__ import annotations

import inspect
from enum import IntEnum
from typing import Any

import torch
from megatron.core.optimizer import clip_grads as upstream
from megatron.core.utils import get_data_parallel_group_if_dtensor

from megatron_overrides.norms.foreign_optimizers import group_grads, is_foreign, is_overridden
from megatron_overrides.norms.gradients import by_dtype, local_part
from megatron_overrides.norms.groups import MTP_GRAD_NORM_GROUP, Group, check_group, separate_groups
from megatron_overrides.norms.optimizer_tree import Reduction, is_exempt, leaves, params_by_group, reductions
from megatron_overrides.norms.step_decision import reads_norms
from megatron_overrides.norms.step_state import set_norms, step_state_of
from megatron_overrides.norms.values import Census, GradNorm, GradNorms


class Row(IntEnum):
    """The rows of the tensor that ranks reduce; it has a column for each group, the main one first."""

    SQUARES = 0  # squared norms, of clipped and of exempt optimizers
    EXEMPT_SQUARES = 1
    OWNERS = 2  # how many leaf optimizers own parameters of the group (main group: how many there are)
    EXEMPT_OWNERS = 3


@torch.no_grad()
def measure(optimizer: Any) -> GradNorms:
    """Every norm of the gradients of `optimizer`, however nested. A collective of all its ranks."""
    state = step_state_of(optimizer)
    separate = separate_groups(getattr(optimizer, "config", None))
    sums, owned = _sum_over_ranks(reductions(optimizer), optimizer, separate)
    may_skip = reads_norms(getattr(optimizer, "config", None))
    state.census = census = _take_census(sums, separate, owned, may_skip, state.census)
    squares = {
        group: (sums[Row.SQUARES][column], sums[Row.EXEMPT_SQUARES][column])
        for column, group in enumerate((None, *separate))
        if group in census.groups
    }
    return GradNorms(
        total={group: (clipped + exempt) ** 0.5 for group, (clipped, exempt) in squares.items()},
        clipping={group: clipped**0.5 for group, (clipped, _) in squares.items()},
        census=census,
    )


def _take_census(
    sums: list[list[GradNorm]], separate: tuple[str, ...], owned: set[Group], may_skip: bool, last: Census | None
) -> Census:
    """Return what any rank has in this step, from the owners that were summed along with the squares.

    Owners on the device are read once, and again only in steps that compare norms with a threshold (`may_skip`), which
    reads those anyway. In other steps a rank adds the groups that it has `owned` to the `last` census: a group that
    joins later is measured and clipped like any other, but ranks that own none of it do not report its norm.
    """
    rows = sums[Row.OWNERS], sums[Row.EXEMPT_OWNERS]
    are_on_device = isinstance(rows[0][0], torch.Tensor)
    if are_on_device and last is not None and not may_skip:
        return last._replace(groups=last.groups | owned)
    (clipped, *owners), (exempt, *exempt_owners) = (torch.cat(row).tolist() if are_on_device else row for row in rows)
    present = (group for group, *counts in zip(separate, owners, exempt_owners, strict=True) if any(counts))
    return Census(frozenset((None, *present)), has_clipped=clipped > 0, has_exempt=exempt > 0)


def _sum_over_ranks(
    shared: list[Reduction], root: Any, separate: tuple[str, ...]
) -> tuple[list[list[GradNorm]], set[Group]]:
    """(sums, groups) of what is `shared` by ranks, whose leaves are below `root`.

    The sums over all ranks are the rows of `Row`, with a column for each group (main one first). The groups are those
    of which this rank owns parameters.
    """
    owned: set[Group] = set()
    sums = _add_up(torch.stack([_reduce(reduction, root, separate, owned) for reduction in shared]))
    for reduction in shared:
        for leaf in reduction.optimizers:
            if leaf is not root and measures_itself(leaf):
                row = sums[Row.EXEMPT_SQUARES if is_exempt(leaf) else Row.SQUARES]
                row[0] = row[0] + (leaf.get_grad_norm() or 0.0) ** 2
    return sums, owned


def _add_up(reduced: torch.Tensor) -> list[list[GradNorm]]:
    """The sum of what each reduction gave, float32 [reductions, rows of `Row`, columns], rounded as Megatron rounds it.

    Norms over one process group stay on the device where this Megatron keeps them there. Of optimizers that are reduced
    over several groups Megatron adds up the squares of rounded norms, and reads the sum on the host.
    """
    keeps_on_device = getattr(upstream, "multi_tensor_scale_tensor_impl", None) is not None
    if not keeps_on_device:
        reduced = reduced.double()
    if len(reduced) > 1:
        squares = reduced[:, : Row.OWNERS]
        squares.copy_(squares.sqrt().square())
    sums = reduced.sum(dim=0)
    if keeps_on_device and len(reduced) == 1:
        return [list(row.split(1)) for row in sums]
    return sums.tolist()  # the one host-device sync


def _reduce(reduction: Reduction, root: Any, separate: tuple[str, ...], owned: set[Group]) -> torch.Tensor:
    """Float32 tensor [rows of `Row`, 1 + groups] of the leaves of `reduction`, below `root`, summed over its ranks.

    It has a column for each group that the configuration allows: a rank may own one that no other rank owns.
    Those of which this rank owns parameters are added to `owned`.
    """
    sums = torch.zeros(len(Row), 1 + len(separate), dtype=torch.float32, device="cuda")
    grads: dict[tuple[Row, int], list[torch.Tensor]] = {}
    for leaf in reduction.optimizers:
        squares, owners = (Row.EXEMPT_SQUARES, Row.EXEMPT_OWNERS) if is_exempt(leaf) else (Row.SQUARES, Row.OWNERS)
        sums[owners, 0] += 1
        params = params_by_group(leaf, separate)
        owned.update(params)
        if leaf is root or not measures_itself(leaf):
            grads.setdefault((squares, 0), []).extend(group_grads(leaf, None, params.get(None, [])))
        for column, group in enumerate(separate, start=1):
            if group in params:
                sums[owners, column] += 1
                grads.setdefault((squares, column), []).extend(group_grads(leaf, group, params[group]))
    shards = None
    for (row, column), column_grads in grads.items():
        for grad in column_grads:
            shards = get_data_parallel_group_if_dtensor(grad, shards)
        for local in by_dtype(map(local_part, column_grads)).values():
            overflow = torch.zeros(1, dtype=torch.int, device="cuda")
            norm, _ = upstream.multi_tensor_applier(upstream.l2_norm_impl, overflow, [local], False)
            sums[row, column : column + 1] += norm**2.0
    if shards is not None:
        torch.distributed.all_reduce(sums, group=shards)
    reduction.all_reduce(sums)
    return sums


def measures_itself(leaf: Any) -> bool:
    """True if the class of `leaf` overrides get_grad_norm, as optimizers of other libraries may."""
    return is_foreign(type(leaf), "get_grad_norm", get_grad_norm)


def step_norms(optimizer: Any, needs_groups: bool = True) -> GradNorms:
    """The norms with which `optimizer` takes this step. A collective: only what all ranks share decides its course.

    Another library's class may override `get_grad_norm`, `_compute_grad_norms_by_group` or both, and without the
    patches that separate norms both are Megatron's. What they measure is taken from them; the rest is measured here.
    `needs_groups` is False if nothing depends on the norms of separate groups, which are then measured only along with
    the main one.
    """
    overrides_main = is_overridden(optimizer, "get_grad_norm", get_grad_norm)
    compute_groups = inspect.getattr_static(optimizer, "_compute_grad_norms_by_group", None)
    overrides_groups = compute_groups not in (None, _compute_grad_norms_by_group)
    if not overrides_main and not overrides_groups:
        return measure(optimizer)
    state = step_state_of(optimizer)
    set_norms(optimizer, None)
    main = optimizer.get_grad_norm()
    computed: set[Group] = {None} if overrides_main else set()
    if needs_groups and overrides_groups:
        if state.census is None or state.census.has_clipped:
            optimizer._compute_grad_norms_by_group()
            computed.update(optimizer.grad_norms_by_group)
    elif needs_groups and measures_itself(optimizer):
        set_norms(optimizer, measure(optimizer))
    total: dict[Group, GradNorm] = {None: main, **optimizer.grad_norms_by_group}
    ours = state.norms
    if ours is None:
        return GradNorms(total, total)
    if ours.clipping[None] != ours.total[None]:
        computed.discard(None)  # their main norm counts what is exempt
    clipping = {group: norm for group, norm in ours.clipping.items() if group not in computed}
    return GradNorms(total, total | clipping, ours.census)


# -- methods of MegatronOptimizer, ChainedOptimizer and LayerWiseDistributedOptimizer ---------------------------------


def get_grad_norm(self: Any) -> GradNorm:
    """The norm of all gradients but those of separate groups, over all ranks; fills `grad_norms_by_group` as well."""
    norms = measure(self)
    set_norms(self, norms)
    return norms.total[None]


def _compute_grad_norms_by_group(self: Any) -> dict[str, GradNorm]:
    """The norm of each separate group that any rank has parameters of, over all ranks."""
    norms = measure(self)
    set_norms(self, norms)
    return norms.by_group


def _get_grad_norm_over(self: Any, optimizers: list[Any]) -> GradNorm:
    """The main norm of some of `chained_optimizers`. A collective, with the same choice on all ranks."""
    chosen = {id(leaf) for optimizer in optimizers for leaf in leaves(optimizer)}
    shared = [
        reduction._replace(optimizers=[leaf for leaf in reduction.optimizers if id(leaf) in chosen])
        for reduction in reductions(self)
    ]
    sums, _ = _sum_over_ranks(shared, self, separate_groups(self.config))
    return (sums[Row.SQUARES][0] + sums[Row.EXEMPT_SQUARES][0]) ** 0.5


def has_grad_norm_group(self: Any, grad_norm_group: str) -> bool:
    """True if any rank has a parameter of this group. A collective at the first call."""
    groups = separate_groups(getattr(self, "config", None))
    check_group(grad_norm_group, groups)
    cache = vars(self).setdefault("_has_grad_norm_group_cache", {})
    if grad_norm_group not in cache:
        flag = torch.zeros(1, dtype=torch.int, device="cuda")
        for reduction in reductions(self):
            flag += any(grad_norm_group in params_by_group(leaf, groups) for leaf in reduction.optimizers)
            reduction.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        cache[grad_norm_group] = bool(flag.item())
    return cache[grad_norm_group]


@property  # type: ignore[misc]
def mtp_grad_norm(self: Any) -> GradNorm | None:
    """The norm of the MTP heads' gradients in the last step; None if they have no separate norm."""
    return getattr(self, "grad_norms_by_group", {}).get(MTP_GRAD_NORM_GROUP)
