"""The step of MimoOptimizer, whose modules run on grids of different ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.mimo.optimizer import MimoOptimizer

from megatron_overrides.core.optimizer.grad_norm_groups import MTP_GRAD_NORM_GROUP
from megatron_overrides.core.optimizer.optimizer import (
    begin_step,
    clip_or_skip,
    finish_step,
    kept_norms,
    measure_groups,
)


@torch.no_grad()
def step(self: MimoOptimizer) -> tuple[bool, float | None, int | None]:
    """Update every active module, or skip the update everywhere. Replaces MimoOptimizer.step.

    Returns what ChainedOptimizer.step does. All ranks of the world agree on whether gradients overflowed and on whether
    every module was updated, because the ranks of one module know nothing about the other modules.
    """
    begin_step(self)
    if _reduce_flag(self.prepare_grads(), torch.distributed.ReduceOp.MAX):
        return False, None, None
    grad_norm = self.get_grad_norm()
    skip = clip_or_skip(self, grad_norm)
    zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
    return _reduce_flag(finish_step(self, skip), torch.distributed.ReduceOp.MIN), grad_norm, zeros


@torch.no_grad()
def get_grad_norm(self: MimoOptimizer) -> float:
    """Return the norm over all modules, the same on every rank. Also sets the norms by group.

    Replaces MimoOptimizer.get_grad_norm. Only the ranks of a module know its norms; the others get them with a maximum,
    in which NaN may lose against their zeros. So a flag beside each norm says whether it is NaN.
    """
    groups = (None, MTP_GRAD_NORM_GROUP)
    numbers = torch.zeros(2, len(groups), len(self.module_infos), 3, dtype=torch.float32, device="cuda")
    for index, (_, info) in enumerate(sorted(self.module_infos.items())):
        if info.is_active and info.optimizer:
            grad_norm = info.optimizer.get_grad_norm() or 0.0
            measure_groups(info.optimizer)
            for kind, norms in enumerate(kept_norms(info.optimizer, grad_norm)):
                for place, group in enumerate(groups):
                    if group in norms:
                        numbers[kind, place, index] = _describe(norms[group])
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    whole, self.clippable_grad_norms = (
        {group: _combine(of_group) for group, of_group in zip(groups, of_kind, strict=True) if of_group.any()}
        for of_kind in numbers
    )
    grad_norm = whole.pop(None, 0.0)
    self.grad_norms_by_group = whole
    return grad_norm


def _describe(norm: Any) -> torch.Tensor:
    """Return (square, whether it is NaN, whether there is a norm at all)."""
    square = float(norm) ** 2
    return torch.tensor([0.0, 1.0, 1.0] if math.isnan(square) else [square, 0.0, 1.0])


def _combine(modules: torch.Tensor) -> float:
    squares, is_nan, _ = modules.T
    return math.nan if is_nan.any() else torch.sqrt(squares.sum()).item()


def _reduce_flag(flag: bool, op: torch.distributed.ReduceOp) -> bool:
    tensor = torch.tensor([flag], dtype=torch.int, device="cuda")
    torch.distributed.all_reduce(tensor, op=op)
    return bool(tensor.item())
