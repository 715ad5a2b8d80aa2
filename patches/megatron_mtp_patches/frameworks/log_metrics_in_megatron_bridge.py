"""Declares log-metrics-in-megatron-bridge."""

from ..engine import Patch, Wrap

_REPORT = "megatron_overrides.report.megatron_log"
_TRAIN_UTILS = "megatron.bridge.training.utils.train_utils"
_EVAL = "megatron.bridge.training.eval"

PATCH = Patch(
    id="log-metrics-in-megatron-bridge",
    summary="Log the metrics of the patches in Megatron-Bridge",
    package="Megatron-Bridge",
    problem="Megatron-Bridge has its own training log, so the metrics of the patches are missing there: the gradient "
    "norm of the MTP heads, skipped updates, the norm by which Muon's gradients are clipped, and in the log line "
    "the acceptance rate. Validation reports nothing of the heads.",
    adds=(
        "The log line, TensorBoard, W&B, MLflow and Comet get the metrics that Megatron-LM's own trainer gets.",
        "Validation runs the heads and reports their losses and accepted lengths, unless `model.mtp_eval` is False.",
    ),
    undetected="It adds metrics, and no run has a wrong number without them.",
    numerics="None.",
    unasked="The log of Megatron-Bridge has the metrics of the patches, and its validation runs the MTP heads.",
    turned_off_by="`model.mtp_eval = False`, for validation",
    notes=("It patches Megatron-Bridge. If the package is not installed, the patch is pending.",),
    edits=(
        Wrap(f"{_TRAIN_UTILS}:training_log", "megatron_overrides.frameworks.bridge:log_metrics"),
        Wrap(  # an imported name; training_log, which prints by it, is checked
            f"{_TRAIN_UTILS}:print_rank_last",
            f"{_REPORT}:append_to_log_line",
            check_source=False,
        ),
        Wrap(f"{_EVAL}:evaluate", f"{_REPORT}:measure_heads"),
        Wrap(f"{_EVAL}:evaluate_and_print_results", "megatron_overrides.frameworks.bridge:report_heads"),
    ),
)
