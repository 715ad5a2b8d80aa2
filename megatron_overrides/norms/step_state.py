"""The step state: what an optimizer measured and decided in its last step, and how many updates it has skipped.

It belongs to the optimizer: two of them in one process (actor and critic) do not mix. Megatron's training log and QK
clipping are handed no optimizer; they read that of the one that stepped last.
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any, NamedTuple

from megatron.core.utils import log_single_rank

from megatron_overrides.norms.groups import MTP_GRAD_NORM_GROUP, MTP_GROUP_SETTINGS
from megatron_overrides.norms.step_decision import Excess, StepDecision, mtp_skip_threshold, skip_threshold
from megatron_overrides.norms.values import Census, GradNorms
from megatron_overrides.settings.checks import spell

logger = logging.getLogger(__name__)


class SkipCounter(NamedTuple):
    """The number of skipped updates, and the report of a skip."""

    warning: str
    total: int = 0

    def plus(self, excess: Excess | None) -> SkipCounter:
        if excess is None:
            return self
        total = self.total + 1
        is_nan = math.isnan(excess.norm)
        is_over = "is NaN, which also counts as over" if is_nan else f"{excess.norm:.6g} is over"
        text = self.warning.format(is_over=is_over, threshold=f"{excess.threshold:g}", total=total)
        log_single_rank(logger, logging.WARNING, text)
        return self._replace(total=total)


class StepState:
    """The state of the steps of one optimizer tree, kept by its root.

    Attributes:
        census: what there was on any rank in the last step that measured; None before anything was measured.
        norms: None after a step that measured none.
        published_norms: the norms of the last step; `norms` may be newer, of a call of clip_grad_norm or get_grad_norm.
        may_skip_updates, may_skip_mtp_updates: whether the last step had a finite threshold; for the latter, MTP heads
            with a separate norm as well.
        steps, skips: steps since Megatron logged the MTP losses, and how many of them were skipped for any reason.
        skipped_updates, skipped_mtp_updates: for their norm, since the optimizer was created.
        watch_findings: what its watch has found since then; None without one.
    """

    def __init__(self) -> None:
        self.census: Census | None = None
        self.norms: GradNorms | None = None
        self.published_norms: GradNorms | None = None
        self.may_skip_updates = self.may_skip_mtp_updates = False
        self.has_measured = False
        self.decision = StepDecision()
        self.steps = self.skips = 0
        self.skipped_updates = SkipCounter(
            "update skipped: grad norm {is_over} --grad-norm-skip-threshold {threshold} ({total} skipped so far)"
        )
        self.skipped_mtp_updates = SkipCounter(
            "MTP heads not updated: their grad norm {is_over} their skip threshold {threshold} ({total} times so far)"
        )
        self.watch_findings: int | None = None


def step_state_of(optimizer: Any) -> StepState:
    """The StepState of `optimizer`, created at its first use."""
    state: StepState | None = vars(optimizer).get("_mtp_patches_step_state")
    if state is None:
        state = optimizer._mtp_patches_step_state = StepState()
    return state


_stepped_last: weakref.ref[StepState] | None = None


def last_step_state() -> StepState:
    """The StepState of the optimizer of this process that stepped last; an empty one if none has, or it is gone."""
    return (_stepped_last and _stepped_last()) or StepState()


def start_step(optimizer: Any) -> StepState:
    """The StepState of an optimizer that steps now, which last_step_state() returns from here on."""
    global _stepped_last
    state = step_state_of(optimizer)
    _stepped_last = weakref.ref(state)
    return state


def publish(optimizer: Any, norms: GradNorms | None = None, decision: StepDecision | None = None) -> None:
    """Make the norms and the decision of a step known: upstream's attributes, counters, log, metrics.

    `norms` is None for a step that measured none, because the loss scaler found inf or NaN or nothing needs them.
    """
    state = start_step(optimizer)
    if norms is not None and not state.has_measured:
        state.has_measured = True
        _warn_of_settings_without_heads(norms, optimizer.config)
    set_norms(optimizer, norms)
    state.decision = decision or StepDecision()
    state.steps += 1
    state.skips += state.decision.skips_update
    state.skipped_updates = state.skipped_updates.plus(state.decision.update_excess)
    state.skipped_mtp_updates = state.skipped_mtp_updates.plus(state.decision.mtp_excess)
    state.published_norms = norms
    groups = (state.census.groups if state.census else frozenset()).union(norms.total if norms else ())
    state.may_skip_updates = math.isfinite(skip_threshold(optimizer.config))
    threshold = mtp_skip_threshold(optimizer.config) if MTP_GRAD_NORM_GROUP in groups else math.inf
    state.may_skip_mtp_updates = math.isfinite(threshold)


def _warn_of_settings_without_heads(norms: GradNorms, config: Any) -> None:
    """At the first step: a setting for MTP heads does nothing if no rank has tagged heads."""
    if MTP_GRAD_NORM_GROUP in norms.total:
        return
    for name in MTP_GROUP_SETTINGS:
        value = getattr(config, name, None)
        if value is not None:
            log_single_rank(
                logger,
                logging.WARNING,
                f"{spell(name)} {value:g} has no effect: no rank has MTP heads with a separate norm. They need "
                f"{spell('mtp_num_layers')}, and {spell('mtp_detach_heads')} or {spell('separate_mtp_grad_clip')}",
            )


def set_norms(optimizer: Any, norms: GradNorms | None) -> None:
    step_state_of(optimizer).norms = norms
    optimizer.grad_norms_by_group = {} if norms is None else norms.by_group
    optimizer.clippable_grad_norms = {} if norms is None else norms.clipping
