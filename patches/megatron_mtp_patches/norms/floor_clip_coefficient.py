"""Declares floor-clip-coefficient."""

from ..declarations.settings import Setting, optimizer_setting
from ..declarations.shared_edits import GRAD_NORMS, OPTIMIZER_STEP, ROUNDED_NORM
from ..engine import Patch

PATCH = Patch(
    id="floor-clip-coefficient",
    summary="Set a lower bound for the clipping factor",
    problem="If one module has very large gradients, Megatron scales all other gradients down by the same tiny factor. "
    "The size of a gradient does not matter to Adam until it comes near its epsilon (1e-8); below that, "
    "parameters hardly move. Where one gradient is 1e14 times the others, the loss of a test stays at 99 % of its "
    "first value; with a floor of 0.001 it falls to 2 %.",
    adds=(
        "`OptimizerConfig.min_clip_coefficient`: gradients are scaled by max(clip_grad / norm, X), also those of MTP "
        "heads (Megatron's MTP layers).",
    ),
    undetected="No flag tells how large a gradient norm becomes.",
    refuses=("An X that is not between 0 and 1, and the flag where nothing is clipped.",),
    numerics=f"With the flag, in steps whose norm exceeds `clip_grad` / X. {ROUNDED_NORM}",
    unasked=ROUNDED_NORM,
    notes=("The report is NVIDIA/Megatron-LM#5394.",),
    edits=(
        *optimizer_setting(
            Setting(
                "min_clip_coefficient",
                float | None,
                None,
                "Lower bound for the factor by which clipping scales gradients (0 < X < 1; none: no bound).",
                check="megatron_overrides.norms.checks:check_coefficient",
            )
        ),
        *GRAD_NORMS,
        *OPTIMIZER_STEP,
    ),
)
