"""Declares add-settings-to-ms-swift."""

from collections.abc import Sequence

from ..engine import AddArgument, AddField, Patch, Wrap

_ARGUMENTS = "swift.megatron.arguments.megatron_args:MegatronArguments"


def declare(fields: Sequence[AddField]) -> Patch:
    """Return the patch that makes arguments of these fields of Megatron's configurations."""
    return Patch(
        id="add-settings-to-ms-swift",
        summary="Settings of the patches as arguments of `megatron sft`, and their metrics in its log",
        package="ms-swift",
        problem=(
            "ms-swift fills Megatron's configurations from the arguments that it declares. It has none for the "
            "settings of the patches, so those of the optimizer cannot be set at all, and its log has no metrics of "
            "the optimizer step."
        ),
        adds=(
            "Arguments of `megatron sft` and the others: " + ", ".join(f"`--{edit.field}`" for edit in fields) + ".",
            "`mtp_grad_norm`, `updates_skipped_for_grad_norm` and the like beside `grad_norm` in its log.",
        ),
        undetected="It adds settings and metrics, and no run has a wrong number without them.",
        numerics="None.",
        unasked="The log of ms-swift has the metrics of the patches.",
        notes=("It patches ms-swift. If the package is not installed, the patch is pending.",),
        edits=(
            *(AddArgument(_ARGUMENTS, edit.field, edit.type, edit.default, edit.doc) for edit in fields),
            Wrap(
                "swift.megatron.trainers.base:BaseMegatronTrainer.on_log",
                "megatron_overrides.frameworks.ms_swift:report_metrics",
            ),
        ),
    )
