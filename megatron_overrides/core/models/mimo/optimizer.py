"""The step of MimoOptimizer, whose modules live on grids of different ranks."""

from __future__ import annotations

import torch
from megatron.core.models.mimo.optimizer import MimoOptimizer

from megatron_overrides.core.optimizer.optimizer import clip_or_skip
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
    num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
    updated = not skip and self.step_with_ready_grads()
    return _reduce_flag(updated, torch.distributed.ReduceOp.MIN), grad_norm, num_zeros


def _reduce_flag(flag: bool, op: torch.distributed.ReduceOp) -> bool:
    tensor = torch.tensor([flag], dtype=torch.int, device="cuda")
    torch.distributed.all_reduce(tensor, op=op)
    return bool(tensor.item())
