"""The step of MimoOptimizer, whose modules live on grids of different ranks."""

from __future__ import annotations

import math

import torch
from megatron.core.models.mimo.optimizer import MimoOptimizer

from megatron_overrides.core.optimizer.optimizer import clip_or_skip, finish_step
from megatron_overrides.core.optimizer.skipped_updates import tally


@torch.no_grad()
def step(self: MimoOptimizer) -> tuple[bool, float | None, int | None]:
    """Update every active module, or skip the update everywhere. Replaces MimoOptimizer.step.

    Returns what ChainedOptimizer.step does. Whether gradients overflowed and whether every module was updated is
    agreed over the world, because a module's own ranks know nothing of the others.
    """
    tally.begin_step()
    if _reduce_flag(self.prepare_grads(), torch.distributed.ReduceOp.MAX):
        return False, None, None
    grad_norm = self.get_grad_norm()
    skip = clip_or_skip(self, grad_norm)
    zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
    return _reduce_flag(finish_step(self, skip), torch.distributed.ReduceOp.MIN), grad_norm, zeros


@torch.no_grad()
def get_grad_norm(self: MimoOptimizer) -> float:
    """The norm over all modules, the same on every rank. Replaces MimoOptimizer.get_grad_norm.

    A module's norm is known to its own ranks and fetched by the rest with a maximum, in which NaN may lose against
    the zeros of the others; so it travels as a mark beside the norm.
    """
    squares_and_marks = torch.zeros(2, len(self.module_infos), dtype=torch.float32, device="cuda")
    for index, (_, info) in enumerate(sorted(self.module_infos.items())):
        if info.is_active and info.optimizer:
            square = float(info.optimizer.get_grad_norm() or 0.0) ** 2
            squares_and_marks[:, index] = torch.tensor([0.0, 1.0] if math.isnan(square) else [square, 0.0])
    torch.distributed.all_reduce(squares_and_marks, op=torch.distributed.ReduceOp.MAX)
    squares, marks = squares_and_marks
    return math.nan if marks.any() else torch.sqrt(squares.sum()).item()


def _reduce_flag(flag: bool, op: torch.distributed.ReduceOp) -> bool:
    tensor = torch.tensor([flag], dtype=torch.int, device="cuda")
    torch.distributed.all_reduce(tensor, op=op)
    return bool(tensor.item())
