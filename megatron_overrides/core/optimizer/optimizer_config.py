"""Settings of the optimizer that cannot work together."""

from __future__ import annotations

import math
from typing import Any


def check_skip_threshold(settings: Any) -> None:
    """Raise ValueError if `settings` (an OptimizerConfig or Megatron's args) cannot skip updates as it asks to."""
    threshold = getattr(settings, "grad_norm_skip_threshold", math.inf)
    if not isinstance(threshold, (int, float)) or not threshold > 0.0:
        raise ValueError(
            f"--grad-norm-skip-threshold {threshold!r} would skip every update or is no number: give a positive "
            f"number, or leave the flag out to skip none"
        )
    if math.isfinite(threshold) and getattr(settings, "optimizer_cuda_graph", False):
        raise ValueError(
            "--grad-norm-skip-threshold needs the gradient norm on the host each step, which --optimizer-cuda-graph "
            "cannot give: leave one of the two flags out"
        )


def check_after_init(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> None:
    """Wraps OptimizerConfig.__post_init__: a configuration made without Megatron's parser is checked too."""
    wrapped(*args, **kwargs)
    check_skip_threshold(instance)
