"""Declares report-nonfinite-mtp-heads."""

from ..declarations.shared_edits import MTP, SHOW_METRICS
from ..engine import Patch, Wrap

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PIPELINES = ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving")

PATCH = Patch(
    id="report-nonfinite-mtp-heads",
    summary="Name MTP heads that are not finite before the first step, and keep their NaN losses in the log",
    problem="MTP heads (Megatron's MTP layers) that nothing has initialized may hold NaN. If the main model is "
    "frozen, its loss stays finite. Then Megatron's check of the gradients ends the run without a name, or, where it "
    "is off (`check_for_nan_in_grad`), the run continues to its end: the log has `grad norm: nan`, no `mtp_1 loss` "
    "and 0 nan iterations, and the checkpoint has heads of NaN. The loss is missing because Megatron and "
    "Megatron-Bridge print a loss only if it is at least 0 (0.16: larger), and NaN is not.",
    adds=(
        "Before the first training step all ranks raise an error if a parameter of the heads is inf or NaN. It names "
        "the parameters and what to set.",
        "A loss of NaN is in the log line: `mtp_1 loss: nan`.",
    ),
    undetected="No setting shows whether the parameters are finite.",
    refuses=("Training of heads with a parameter that is inf or NaN before the first step.",),
    numerics="None.",
    unasked="A run whose MTP heads have a parameter that is inf or NaN ends before its first step. The log line shows "
    "an MTP loss of NaN.",
    notes=(
        "The check reads the parameters of the heads once. Later steps do not pay for it, and models without heads "
        "not at all. Parameters that are kept in fp8 or fp4 are not read.",
        "It is part of Megatron's schedules (`get_forward_backward_func`), and is left out if the first call of one is "
        "captured in a CUDA graph.",
    ),
    edits=(
        *(
            Wrap(
                f"{_SCHEDULES}:forward_backward_{pipeline}",
                "megatron_overrides.mtp.heads.first_step:check_heads_once",
                check_source=False,
            )
            for pipeline in _PIPELINES
        ),
        Wrap(
            f"{MTP}:MTPLossLoggingHelper.track_mtp_metrics",
            "megatron_overrides.mtp.metrics.logged_losses:keep_losses",
            check_source=False,
        ),
        *SHOW_METRICS,
    ),
)
