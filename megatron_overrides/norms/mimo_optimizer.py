"""The step of MimoOptimizer, whose modules run on grids of different ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.mimo.optimizer import MimoOptimizer

from megatron_overrides.norms.groups import separate_groups
from megatron_overrides.norms.measuring import step_norms
from megatron_overrides.norms.optimizer_step import limit_gradients, update
from megatron_overrides.norms.step_decision import StepDecision, decide, needs_norms
from megatron_overrides.norms.step_state import publish, set_norms, step_state_of
from megatron_overrides.norms.values import GradNorms


@torch.no_grad()
def step(self: MimoOptimizer) -> tuple[bool, float | None, int | None]:
    """Update every active module, or skip the update everywhere. Replaces MimoOptimizer.step.

    Returns what ChainedOptimizer.step does. All ranks of the world agree on whether gradients overflowed and on whether
    every module was updated, because the ranks of one module do not know the other modules.
    """
    if _reduce_flag(self.prepare_grads(), torch.distributed.ReduceOp.MAX):
        publish(self, decision=StepDecision(overflowed=True))
        return False, None, None
    set_norms(self, None)
    grad_norm = self.get_grad_norm()
    norms = step_state_of(self).norms or GradNorms({None: grad_norm}, {None: grad_norm})
    decision = decide(norms, self.config)
    publish(self, norms, decision)
    limit_gradients(self, norms, decision)
    num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
    updated = update(self, norms, decision)
    return _reduce_flag(updated, torch.distributed.ReduceOp.MIN), grad_norm, num_zeros


@torch.no_grad()
def get_grad_norm(self: MimoOptimizer) -> float:
    """Return the norm over all modules, the same on every rank; fills `grad_norms_by_group` as well.

    Replaces MimoOptimizer.get_grad_norm. Only the ranks of a module know its norms; the others get them with a maximum,
    in which NaN may lose against their zeros. So a flag beside each norm tells whether it is NaN.
    """
    groups = (None, *separate_groups(self.config))
    # total and clipping, groups, modules, the numbers of _describe
    numbers = torch.zeros(2, len(groups), len(self.module_infos), 3, dtype=torch.float32, device="cuda")
    for index, (_, info) in enumerate(sorted(self.module_infos.items())):
        if info.is_active and info.optimizer:
            norms = step_norms(info.optimizer, needs_norms(info.optimizer.config))
            for kind, by_group in enumerate((norms.total, norms.clipping)):
                for place, group in enumerate(groups):
                    if group in by_group:
                        numbers[kind, place, index] = _describe(by_group[group])
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    total, clipping = (
        {group: _combine(norms) for group, norms in zip(groups, group_norms, strict=True) if norms.any()}
        for group_norms in numbers
    )
    set_norms(self, GradNorms({None: 0.0, **total}, {None: 0.0, **clipping}))
    return total.get(None, 0.0)


def _describe(norm: Any) -> torch.Tensor:
    """Return (square, whether it is NaN, whether there is a norm at all)."""
    square = float(norm or 0.0) ** 2
    return torch.tensor([0.0, 1.0, 1.0] if math.isnan(square) else [square, 0.0, 1.0])


def _combine(modules: torch.Tensor) -> float:
    squares, is_nan, _ = modules.T
    return math.nan if is_nan.any() else torch.sqrt(squares.sum()).item()


def _reduce_flag(flag: bool, op: torch.distributed.ReduceOp) -> bool:
    tensor = torch.tensor([flag], dtype=torch.int, device="cuda")
    torch.distributed.all_reduce(tensor, op=op)
    return bool(tensor.item())
