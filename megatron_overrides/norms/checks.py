"""Refuse thresholds, limits and factors of norms that cannot work, and wrong arguments of functional/norms.py."""

from __future__ import annotations

import math
from typing import Any

from megatron_overrides.norms.groups import MTP_GRAD_NORM_GROUP, MTP_GROUP_SETTINGS, named_groups
from megatron_overrides.norms.optimizer_tree import check_optimizer
from megatron_overrides.norms.step_decision import StepDecision
from megatron_overrides.norms.values import GradNorms
from megatron_overrides.settings.checks import spell


def check_threshold(settings: Any) -> None:
    """Raise ValueError if each update would be skipped, or by what is not a number, or if the host has no norm."""
    thresholds = {"grad_norm_skip_threshold": getattr(settings, "grad_norm_skip_threshold", math.inf)}
    if getattr(settings, "mtp_grad_norm_skip_threshold", None) is not None:
        thresholds["mtp_grad_norm_skip_threshold"] = settings.mtp_grad_norm_skip_threshold
    for name, threshold in thresholds.items():
        if not isinstance(threshold, (int, float)) or not threshold > 0.0:
            raise ValueError(
                f"{spell(name)} {threshold!r} would skip every update or is not a number: give a positive number, or "
                f"leave it out to skip none"
            )
        if math.isfinite(threshold) and getattr(settings, "optimizer_cuda_graph", False):
            raise ValueError(
                f"{spell(name)} needs the gradient norm on the host each step, which {spell('optimizer_cuda_graph')} "
                f"cannot give: leave one of the two out"
            )


def check_limit(settings: Any) -> None:
    """Raise ValueError if `mtp_clip_grad` is not a norm, or if a setting clips heads that have no separate norm."""
    limit = getattr(settings, "mtp_clip_grad", None)
    if limit is not None and not (isinstance(limit, (int, float)) and limit >= 0.0):
        raise ValueError(
            f"{spell('mtp_clip_grad')} {limit!r} is not a norm to clip to: give a positive number, 0 to clip no MTP "
            f"gradient, or leave it out to use clip_grad"
        )
    _check_separate_clip(settings)


def check_named_groups(settings: Any) -> None:
    """Raise ValueError if a group of `grad_norm_group` cannot be read."""
    named_groups(settings)


def check_coefficient(settings: Any) -> None:
    """Raise ValueError if `min_clip_coefficient` is not a factor, or if nothing is clipped."""
    least = getattr(settings, "min_clip_coefficient", None)
    if least is None:
        return
    if not isinstance(least, (int, float)) or not 0.0 < least < 1.0:
        raise ValueError(
            f"{spell('min_clip_coefficient')} {least!r} is not a factor to scale gradients down by: give a number "
            f"between 0 and 1, or leave it out to clip by any factor"
        )
    limits = [getattr(settings, name, None) or 0.0 for name in ("clip_grad", "mtp_clip_grad")]
    if not max(*limits, *(group.limit for group in named_groups(settings))) > 0.0:
        raise ValueError(
            f"{spell('min_clip_coefficient')} {least!r} has nothing to hold back, because no gradient is clipped: set "
            f"clip_grad, mtp_clip_grad or a limit of grad_norm_group, or leave it out"
        )


def _check_separate_clip(settings: Any) -> None:
    """Raise ValueError if `settings` clip MTP heads that have no separate norm.

    Args:
        settings: of model and optimizer in one. Those of an optimizer alone pass: its model has no heads.
    """
    if getattr(settings, "mtp_detach_heads", False) or getattr(settings, "separate_mtp_grad_clip", True):
        return
    for name in MTP_GROUP_SETTINGS:
        if getattr(settings, name, None) is not None:
            raise ValueError(
                f"{spell(name)} needs MTP heads with a separate norm: add {spell('mtp_detach_heads')}, or "
                f"{spell('separate_mtp_grad_clip')} to keep training the main model with the MTP loss"
            )


def check_norms(norms: object) -> None:
    """Raise TypeError unless `norms` is what `measure` returns."""
    if not isinstance(norms, GradNorms):
        raise TypeError(f"give the norms that grad_norms(optimizer) returned, not a {type(norms).__name__}")


def check_step(optimizer: Any, norms: Any, decision: Any) -> None:
    """Raise TypeError unless they are an optimizer of Megatron, the norms of all its groups, and a decision or None."""
    check_optimizer(optimizer)
    check_norms(norms)
    if decision is not None and not isinstance(decision, StepDecision):
        raise TypeError(
            f"give the decision that decide(norms, config) returned, or leave it out, not a {type(decision).__name__}"
        )


def check_norms_for(config: Any, norms: GradNorms) -> None:
    """Check the norms and the configuration of a trainer that tags the MTP heads itself.

    Raises:
        TypeError: not the norms of `measure`, or `config` has no setting of an optimizer.
        ValueError: it has a setting for MTP heads, and no rank has a parameter that is tagged as theirs.
    """
    check_norms(norms)
    if not any(hasattr(config, name) for name in ("clip_grad", "grad_norm_skip_threshold", *MTP_GROUP_SETTINGS)):
        raise TypeError(f"give the configuration of the optimizer, optimizer.config, not a {type(config).__name__}")
    for name in MTP_GROUP_SETTINGS:
        if getattr(config, name, None) is not None and MTP_GRAD_NORM_GROUP not in norms.total:
            raise ValueError(f"config.{name} needs tagged MTP heads: call tag(model, optimizer) after both are built")
