"""One optimizer step for chained, bare and nested optimizers of every release: all of an update or nothing of it.

Upstream decides skipping once per child from the parameters that this rank owns, so ranks can disagree and hang in the
parameter all-gather (NVIDIA/Megatron-LM#3460). Here a step hands its results on: step_norms (measuring.py), decide
(step_decision.py), publish (step_state.py), limit_gradients and update. The step of MimoOptimizer (mimo_optimizer.py)
has the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer

from megatron_overrides.norms.clipping import clip
from megatron_overrides.norms.dropped_gradients import count_dropped_step, drop_mtp_gradients, skip_update
from megatron_overrides.norms.measuring import step_norms
from megatron_overrides.norms.step_decision import StepDecision, decide, needs_norms
from megatron_overrides.norms.step_state import publish, set_norms
from megatron_overrides.norms.values import GradNorm, GradNorms


@torch.no_grad()
def step_chained(self: MegatronOptimizer) -> tuple[bool, GradNorm | None, int | None]:
    """Update everything chained in this optimizer, or skip the update. Replaces ChainedOptimizer.step.

    Returns:
        (updated, norm of the main group before clipping, number of zero gradients). `updated` is False, on
        every rank alike, if the loss scaler found inf or NaN or the norm is over `config.grad_norm_skip_threshold`.
        The norm is a float or, from 0.17 on with TransformerEngine >= 2.14, a one-element CUDA tensor; the number is
        None unless `config.log_num_zeros_in_grad`.
    """
    if self.prepare_grads():
        publish(self, decision=StepDecision(overflowed=True))
        return False, None, None
    norms = step_norms(self, needs_norms(self.config))
    decision = decide(norms, self.config)
    publish(self, norms, decision)
    limit_gradients(self, norms, decision)
    num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
    return update(self, norms, decision), norms.total[None], num_zeros


@torch.no_grad()
def step_alone(self: MegatronOptimizer) -> tuple[bool, GradNorm | None, int | None]:
    """Update what a single optimizer has, or skip the update. Megatron-FSDP makes one, RL frameworks make others.

    Replaces MixedPrecisionOptimizer.step and FP32Optimizer.step. As there, the norms are measured only if something
    needs them: clipping or, here, a finite threshold or a named group.
    """
    if self.prepare_grads():
        publish(self, decision=StepDecision(overflowed=True))
        return False, None, None
    norms, decision = None, StepDecision()
    # What the two classes report for a number that nothing asked for.
    grad_norm, num_zeros = (0.0, 0) if isinstance(self, MixedPrecisionOptimizer) else (None, None)
    with _timed(self.config, "optimizer-clip-main-grad"):
        if needs_norms(self.config):
            norms = step_norms(self)
            grad_norm = norms.total[None]
            decision = decide(norms, self.config)
            publish(self, norms, decision)
            limit_gradients(self, norms, decision)
        else:
            publish(self)
    with _timed(self.config, "optimizer-count-zeros"):
        if self.config.log_num_zeros_in_grad:
            num_zeros = self.count_zeros()
    return update(self, norms, decision), grad_norm, num_zeros


def limit_gradients(optimizer: MegatronOptimizer, norms: GradNorms, decision: StepDecision) -> None:
    """Clip the gradients of the coming update and drop those that it leaves out; a skipped update keeps them all."""
    if decision.skips_update:
        return
    clip(optimizer, norms, skips_mtp=decision.skips_mtp)
    if decision.skips_mtp:
        drop_mtp_gradients(optimizer, norms)


def update(optimizer: MegatronOptimizer, norms: GradNorms | None, decision: StepDecision) -> bool:
    """Update the parameters unless the update is to be skipped; returns whether they were updated."""
    if decision.skips_update:
        skip_update(optimizer)
        return False
    updated = optimizer.step_with_ready_grads()
    if norms is not None and decision.skips_mtp:
        count_dropped_step(optimizer, norms)
    return updated


def clip_grad_norm(self: MegatronOptimizer, clip_grad: float) -> GradNorm:
    """Clip the main group to `clip_grad` and separate groups by their norms; returns the norm of the main group.

    Replaces MegatronOptimizer.clip_grad_norm. With `clip_grad` 0 it only measures. Optimizers that are exempt from
    clipping are left alone.
    """
    norms = step_norms(self)
    set_norms(self, norms)
    clip(self, norms, main_limit=clip_grad)
    return norms.total[None]


def get_parameters_of_chain(self: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """ChainedOptimizer.get_parameters, which 0.16.1 lacks: the inherited one wants exactly one child."""
    return [param for child in self.chained_optimizers for param in child.get_parameters()]


@contextmanager
def _timed(config: Any, name: str) -> Iterator[None]:
    timers = config.timers
    if timers is not None:
        timers(name, log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if timers is not None:
        timers(name).stop()
