"""Never clip gradients by more than a given factor.

Upstream: none; from the report NVIDIA/Megatron-LM#5394.
Without it: one module with very large gradients scales those of all others down by the same tiny factor. Adam does not
    mind the size of a gradient until it comes near its epsilon (1e-8); under it, parameters hardly move.
Adds: `OptimizerConfig.min_clip_coefficient`, `--min-clip-coefficient X` (0 < X < 1; default: no floor). Gradients are
    scaled by max(clip_grad / norm, X), main ones and those of MTP heads.
Changes numbers: with the flag, in steps whose norm is over clip_grad / X.
"""

from .engine import Patch
from .shared_edits import CHECK_SETTINGS, GRAD_NORMS, OPTIMIZER_STEP, add_optimizer_setting

PATCH = Patch(
    id="floor-clip-coefficient",
    doc=__doc__,
    upstream=(),
    probe=None,
    edits=(
        *add_optimizer_setting(
            "min_clip_coefficient",
            float | None,
            None,
            "Never scale gradients by less than this when they are clipped (0 < X < 1); without it, there is no floor.",
        ),
        *CHECK_SETTINGS,
        *GRAD_NORMS,
        *OPTIMIZER_STEP,
    ),
)
