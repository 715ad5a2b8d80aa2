"""The decision about a step, made from its reduced norms alone, so that every rank decides the same."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from megatron_overrides.norms.groups import (
    MTP_GRAD_NORM_GROUP,
    Group,
    clip_limit,
    named_groups,
    separate_groups,
)
from megatron_overrides.norms.values import GradNorms
from megatron_overrides.settings.checks import spell


class Excess(NamedTuple):
    """A gradient norm that is larger than its skip threshold, or NaN."""

    norm: float
    threshold: float


class StepDecision(NamedTuple):
    """The reasons to skip the whole update, and that of the MTP heads; None for an update that is taken.

    `overflowed`: the loss scaler found inf or NaN, which skips the update before anything is measured.
    """

    update_excess: Excess | None = None
    mtp_excess: Excess | None = None
    overflowed: bool = False

    @property
    def skips_update(self) -> bool:
        return self.overflowed or self.update_excess is not None

    @property
    def skips_mtp(self) -> bool:
        return self.mtp_excess is not None


def skip_threshold(config: Any) -> float:
    """The norm over which an update is skipped; inf for never, in which case no norm is read on the host."""
    return getattr(config, "grad_norm_skip_threshold", math.inf)


def mtp_skip_threshold(config: Any) -> float:
    """The norm over which the MTP heads are not updated; inf without the patch that separates their norm."""
    threshold = getattr(config, "mtp_grad_norm_skip_threshold", math.inf)
    return skip_threshold(config) if threshold is None else threshold


def reads_norms(config: Any) -> bool:
    """True if a finite threshold has the norms read on the host in each step."""
    return math.isfinite(skip_threshold(config)) or math.isfinite(mtp_skip_threshold(config))


def needs_norms(config: Any) -> bool:
    """True if a step has to measure norms: to clip, to compare them with a finite threshold, or for a named group."""
    limits = (clip_limit(config, group) for group in (None, *separate_groups(config)))
    return max(limits) > 0.0 or reads_norms(config) or bool(named_groups(config))


def decide(norms: GradNorms, config: Any) -> StepDecision:
    """Compare the norms with the thresholds of `config`.

    Optimizers that are exempt from clipping count in neither comparison. But with a finite threshold, a gradient of
    theirs that is NaN or inf still skips the update.

    Raises:
        ValueError: no rank has a parameter of a group that --grad-norm-group names.
    """
    for group in named_groups(config):
        if group.name not in norms.total:
            raise ValueError(
                f"{spell('grad_norm_group')} {group.name}: no parameter on any rank matches "
                f"{group.pattern.pattern!r}. It is searched in the names of model.named_parameters(), without leading "
                f"`module.`; MTP heads with a separate norm and parameters of an earlier group are taken"
            )
    update = _excess(norms, None, skip_threshold(config))
    if update is not None or MTP_GRAD_NORM_GROUP not in norms.total:
        return StepDecision(update)
    return StepDecision(mtp_excess=_excess(norms, MTP_GRAD_NORM_GROUP, mtp_skip_threshold(config)))


def _excess(norms: GradNorms, group: Group, threshold: float) -> Excess | None:
    if not math.isfinite(threshold):
        return None
    # Exempt gradients may have any size but have to be numbers, and their norm a float32: it is inf over 1.8e19.
    norm = norms.clipping[group] if math.isfinite(norms.total[group]) else norms.total[group]
    if bool(norm <= threshold):  # NaN is neither larger nor smaller, and must not pass
        return None
    return Excess(float(norm), threshold)
