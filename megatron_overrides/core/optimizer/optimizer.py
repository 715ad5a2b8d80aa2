"""One optimizer step for chained, bare and nested optimizers of every release: all of an update or nothing of it.

Upstream decides skipping once per child from the parameters that this rank owns, so ranks can disagree and hang in
the parameter all-gather (NVIDIA/Megatron-LM#3460). Here the reduced norm alone decides, before anything is clipped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import optimizer as upstream
from megatron.core.optimizer.optimizer import MegatronOptimizer, MixedPrecisionOptimizer

from megatron_overrides import metrics
from megatron_overrides.core.optimizer import skipped_updates
from megatron_overrides.core.optimizer.grad_norm_groups import (
    MTP_GRAD_NORM_GROUP,
    drop_gradients,
    group_of,
    has_decoupled_grad,
    keep_in_step,
)
from megatron_overrides.core.optimizer.norms import (
    GradNorm,
    _compute_grad_norms_by_group,
    get_grad_norm,
    measures_itself,
)
from megatron_overrides.core.optimizer.orthogonalized import is_exempt
from megatron_overrides.core.optimizer.skipped_updates import updates, updates_of_heads


@torch.no_grad()
def step_chained(self: MegatronOptimizer) -> tuple[bool, GradNorm | None, int | None]:
    """Update everything chained in this optimizer, or skip the update. Replaces ChainedOptimizer.step.

    Returns:
        (updated, norm of the main gradients before clipping, number of zero gradients). `updated` is False, on
        every rank alike, where the loss scaler found inf or NaN and where the norm is over
        `config.grad_norm_skip_threshold`. The norm is a float or, from 0.17 on with TransformerEngine >= 2.14, a
        one-element CUDA tensor; the number is None unless `config.log_num_zeros_in_grad`.
    """
    begin_step(self)
    if self.prepare_grads():
        return False, None, None
    grad_norm = self.get_grad_norm()
    measure_groups(self)
    skip = clip_or_skip(self, grad_norm)
    num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
    return finish_step(self, skip), grad_norm, num_zeros


@torch.no_grad()
def step_alone(self: MegatronOptimizer) -> tuple[bool, GradNorm | None, int | None]:
    """The same for an optimizer that stands alone (Megatron-FSDP makes one, RL frameworks make others).

    Replaces MixedPrecisionOptimizer.step and FP32Optimizer.step. As there, the norms are measured only if something
    needs them: clipping or, here, a finite threshold.
    """
    begin_step(self)
    if self.prepare_grads():
        return False, None, None
    # What the two classes report for a number that nobody asked for.
    grad_norm, num_zeros = (0.0, 0) if isinstance(self, MixedPrecisionOptimizer) else (None, None)
    skip = False
    with _timed(self.config, "optimizer-clip-main-grad"):
        if _needs_norms(self.config):
            grad_norm = self.get_grad_norm()
            measure_groups(self)
            skip = clip_or_skip(self, grad_norm)
    with _timed(self.config, "optimizer-count-zeros"):
        if self.config.log_num_zeros_in_grad:
            num_zeros = self.count_zeros()
    return finish_step(self, skip), grad_norm, num_zeros


def begin_step(optimizer: MegatronOptimizer) -> None:
    """Forget what was measured and decided in the step before."""
    skipped_updates.begin_step()
    optimizer.grad_norms_by_group = {}
    optimizer.clippable_grad_norms = {}


def measure_groups(optimizer: MegatronOptimizer) -> None:
    """Let a method that is not ours measure the separate groups, or ours where get_grad_norm, not ours, has not.

    This is a collective, so only what all ranks share may decide whether to enter it.
    """
    method = inspect.getattr_static(optimizer, "_compute_grad_norms_by_group", None)
    if method is None or not _needs_norms(optimizer.config):
        return
    owned = getattr(optimizer, "_owned", None)
    if method is not _compute_grad_norms_by_group and (owned is None or owned.clippable):
        optimizer._compute_grad_norms_by_group()
        for group in optimizer.grad_norms_by_group:
            getattr(optimizer, "clippable_grad_norms", {}).pop(group, None)
    elif measures_itself(optimizer):
        optimizer._compute_grad_norms_by_group()


def kept_norms(
    optimizer: MegatronOptimizer, grad_norm: GradNorm
) -> tuple[dict[str | None, GradNorm], dict[str | None, GradNorm]]:
    """The norms of this step by group, the main one under None: of all gradients, and of those that may be clipped."""
    whole = {None: grad_norm, **getattr(optimizer, "grad_norms_by_group", {})}
    return whole, whole | getattr(optimizer, "clippable_grad_norms", {})


def clip_or_skip(optimizer: MegatronOptimizer, grad_norm: GradNorm) -> bool:
    """Scale the gradients down to their limits, or return True because the update must be skipped.

    `grad_norm` and the norms that `optimizer` keeps must be reduced over all ranks that step together: they alone
    decide. A main norm over its threshold skips the update; an MTP norm over its own drops the update of the heads.
    Optimizers that are exempt from clipping count in neither, but a gradient of theirs that is no number does.
    """
    whole, clippable = kept_norms(optimizer, grad_norm)
    mtp_norm = whole.get(MTP_GRAD_NORM_GROUP)
    if mtp_norm is not None:
        metrics.show("mtp grad norm", mtp_norm, "mtp-grad-norm")
    owned = getattr(optimizer, "_owned", None)
    if owned is not None and owned.clippable and owned.exempt:
        metrics.show("clippable grad norm", clippable[None], "clippable-grad-norm")
    if updates.skips(clippable[None], grad_norm, optimizer.config):
        return True
    drops_mtp = mtp_norm is not None and updates_of_heads.skips(
        clippable[MTP_GRAD_NORM_GROUP], mtp_norm, optimizer.config
    )
    for leaf in leaves(optimizer):
        for group, params in _params_by_group(leaf, optimizer).items():
            if drops_mtp and group == MTP_GRAD_NORM_GROUP:
                drop_gradients(params, getattr(leaf, "optimizer", None))
            elif not is_exempt(leaf):
                _clip(params, _limit(leaf.config, group), clippable.get(group, clippable[None]), leaf.config)
    return False


def clip_grad_norm(self: MegatronOptimizer, clip_grad: float) -> GradNorm:
    """Clip the main gradients to `clip_grad` and those of separate groups by their own norms; returns the main norm.

    Replaces MegatronOptimizer.clip_grad_norm. With `clip_grad` 0 it only measures. Optimizers that are exempt from
    clipping are left alone.
    """
    if measures_itself(self):
        grad_norm = self.get_grad_norm()
        _compute_grad_norms_by_group(self)
    else:
        grad_norm = get_grad_norm(self)
    _, clippable = kept_norms(self, grad_norm)
    for leaf in leaves(self):
        if not is_exempt(leaf):
            for group, params in _params_by_group(leaf, self).items():
                limit = clip_grad if group is None else _limit(self.config, group)
                _clip(params, limit, clippable.get(group, clippable[None]), self.config)
    return grad_norm


def _params_by_group(leaf: MegatronOptimizer, root: MegatronOptimizer) -> dict[str | None, list[torch.nn.Parameter]]:
    """The parameters of `leaf`, which is part of `root`, by the norm that clips them."""
    params = [] if getattr(leaf, "is_stub_optimizer", False) else leaf.get_parameters()
    owned = getattr(root, "_owned", None)
    if owned is not None and not owned.groups:  # none on any rank, so there is no need to ask each
        return {None: params} if params else {}
    params_by_group: dict[str | None, list[torch.nn.Parameter]] = {}
    for param in params:
        params_by_group.setdefault(group_of(param), []).append(param)
    return params_by_group


def _needs_norms(config: Any) -> bool:
    limits = _limit(config, None), _limit(config, MTP_GRAD_NORM_GROUP)
    return max(limits) > 0.0 or updates.watches(config) or updates_of_heads.watches(config)


def _limit(config: Any, group: str | None) -> float:
    own = getattr(config, "mtp_clip_grad", None) if group == MTP_GRAD_NORM_GROUP else None
    return config.clip_grad if own is None else own


def _clip(params: list[torch.nn.Parameter], limit: float, norm: GradNorm, config: Any) -> None:
    if limit > 0.0:
        least = getattr(config, "min_clip_coefficient", None)
        if least is not None:
            # Megatron's coefficient is limit / (norm + 1e-6).
            largest = limit / least - 1e-6
            norm = norm.clamp(max=largest) if isinstance(norm, torch.Tensor) else min(norm, largest)
        decoupled = config.use_precision_aware_optimizer and any(has_decoupled_grad(param, config) for param in params)
        # By Megatron's name for it, so that whoever has put a faster one there is heard.
        upstream.clip_grad_by_total_norm_fp32(params, max_norm=limit, total_norm=norm, use_decoupled_grad=decoupled)


def get_parameters_of_chain(self: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """ChainedOptimizer.get_parameters, which 0.16.1 lacks: the inherited one wants exactly one child."""
    return [param for child in self.chained_optimizers for param in child.get_parameters()]


def finish_step(optimizer: MegatronOptimizer, skip: bool) -> bool:
    """Update the parameters unless the update is to be skipped; returns whether they were updated."""
    if not skip:
        updated = optimizer.step_with_ready_grads()
        if updates_of_heads.in_last_step:
            for leaf in leaves(optimizer):
                keep_in_step(_params_by_group(leaf, optimizer).get(MTP_GRAD_NORM_GROUP, []), leaf)
        return updated
    for leaf in leaves(optimizer):
        # Megatron-FSDP v2 (main) steps on casted gradients and gives the model its own back only after an update.
        casted = getattr(leaf, "_casted_grads", [])
        while casted:
            param, model_grad = casted.pop()
            param.grad = None
            param.grad_dtype = model_grad.dtype
            param.grad = model_grad
    return False


def leaves(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    """The optimizers that own parameters, however deep ChainedOptimizer, LayerWise and Mimo nest them."""
    for name in ("chained_optimizers", "_active_optimizers"):
        if hasattr(optimizer, name):
            for child in getattr(optimizer, name):
                yield from leaves(child)
            return
    yield optimizer


@contextmanager
def _timed(config: Any, name: str) -> Iterator[None]:
    timers = config.timers
    if timers is not None:
        timers(name, log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if timers is not None:
        timers(name).stop()
