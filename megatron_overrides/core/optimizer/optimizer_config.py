"""Check the settings of the optimizer: each by itself, and those that cannot work together."""

from __future__ import annotations

import math
from typing import Any

from megatron_overrides.support.norm_groups import named_groups


def check_settings(settings: Any) -> None:
    """Raise ValueError if `settings` (an OptimizerConfig or Megatron's args) cannot do what they ask for."""
    _check_threshold("--grad-norm-skip-threshold", getattr(settings, "grad_norm_skip_threshold", math.inf), settings)
    mtp_threshold = getattr(settings, "mtp_grad_norm_skip_threshold", None)
    if mtp_threshold is not None:
        _check_threshold("--mtp-grad-norm-skip-threshold", mtp_threshold, settings)
    limit = getattr(settings, "mtp_clip_grad", None)
    if limit is not None and not (isinstance(limit, (int, float)) and limit >= 0.0):
        raise ValueError(
            f"--mtp-clip-grad {limit!r} is no norm to clip to: give a positive number, 0 to clip no MTP gradient, or "
            f"leave the flag out to use --clip-grad"
        )
    named_groups(settings)
    _check_coefficient(settings)


def _check_coefficient(settings: Any) -> None:
    least = getattr(settings, "min_clip_coefficient", None)
    if least is None:
        return
    if not isinstance(least, (int, float)) or not 0.0 < least < 1.0:
        raise ValueError(
            f"--min-clip-coefficient {least!r} is no factor to scale gradients down by: give a number between 0 and 1, "
            f"or leave the flag out to clip by any factor"
        )
    limits = [getattr(settings, name, None) or 0.0 for name in ("clip_grad", "mtp_clip_grad")]
    if not max(*limits, *(group.limit for group in named_groups(settings))) > 0.0:
        raise ValueError(
            f"--min-clip-coefficient {least!r} has nothing to hold back, because no gradient is clipped: set "
            f"--clip-grad, --mtp-clip-grad or a limit of --grad-norm-group, or leave the flag out"
        )


def _check_threshold(flag: str, threshold: Any, settings: Any) -> None:
    if not isinstance(threshold, (int, float)) or not threshold > 0.0:
        raise ValueError(
            f"{flag} {threshold!r} would skip every update or is no number: give a positive number, or leave the flag "
            f"out to skip none"
        )
    if math.isfinite(threshold) and getattr(settings, "optimizer_cuda_graph", False):
        raise ValueError(
            f"{flag} needs the gradient norm on the host each step, which --optimizer-cuda-graph cannot give: leave "
            f"one of the two flags out"
        )


def check_after_init(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps OptimizerConfig.__post_init__: a configuration made without Megatron's parser is checked too."""
    wrapped(*args, **kwargs)
    check_settings(instance)
