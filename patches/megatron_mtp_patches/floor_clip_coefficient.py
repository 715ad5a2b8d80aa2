"""Declares floor-clip-coefficient."""

from .engine import Patch
from .shared_edits import CHECK_SETTINGS, GRAD_NORMS, OPTIMIZER_STEP, add_optimizer_setting

PATCH = Patch(
    id="floor-clip-coefficient",
    summary="Set a lower bound for the clipping factor",
    problem=(
        "One module with very large gradients scales those of all others down by the same tiny factor. Adam does not "
        "depend on the size of a gradient until it comes near its epsilon (1e-8); below that, parameters hardly move. "
        "Where one gradient is 1e14 times the others, the loss of a test stays at 99 % of its first value; with a "
        "floor of 0.001 it falls to 2 %."
    ),
    adds=(
        "`OptimizerConfig.min_clip_coefficient`: gradients are scaled by max(clip_grad / norm, X), those of MTP heads "
        "too.",
    ),
    refuses=("A bound that is not between 0 and 1, and one where nothing is clipped.",),
    numerics="With the flag, in steps whose norm is over clip_grad / X.",
    notes=("The report is NVIDIA/Megatron-LM#5394.",),
    edits=(
        *add_optimizer_setting(
            "min_clip_coefficient",
            float | None,
            None,
            "Lower bound for the factor by which clipping scales gradients (0 < X < 1; none: no bound).",
        ),
        *CHECK_SETTINGS,
        *GRAD_NORMS,
        *OPTIMIZER_STEP,
    ),
)
