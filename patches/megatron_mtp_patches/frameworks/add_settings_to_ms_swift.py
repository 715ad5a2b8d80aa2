"""Declares add-settings-to-ms-swift."""

from ..engine import AddArgument, AddField, Patch, Wrap
from ..mtp import detach_mtp_heads
from ..muon import exempt_muon_from_clipping
from ..norms import (
    clip_mtp_grads_separately,
    clip_named_groups_separately,
    floor_clip_coefficient,
    skip_update_on_large_grad_norm,
)

_ARGUMENTS = "swift.megatron.arguments.megatron_args:MegatronArguments"
_DECLARED_BY = (
    detach_mtp_heads,
    clip_mtp_grads_separately,
    clip_named_groups_separately,
    exempt_muon_from_clipping,
    floor_clip_coefficient,
    skip_update_on_large_grad_norm,
)
_SETTINGS = tuple(edit for module in _DECLARED_BY for edit in module.PATCH.edits if isinstance(edit, AddField))

PATCH = Patch(
    id="add-settings-to-ms-swift",
    summary="Settings of the patches as arguments of `megatron sft`, and their metrics in its log",
    package="ms-swift",
    problem=(
        "ms-swift fills Megatron's configurations from the arguments that it declares. It has none for the settings of "
        "the patches, so those of the optimizer cannot be set at all, and its log has no metrics of the optimizer step."
    ),
    adds=(
        "Arguments of `megatron sft` and the others: " + ", ".join(f"`--{edit.field}`" for edit in _SETTINGS) + ".",
        "`mtp_grad_norm`, `updates_skipped_for_grad_norm` and the like beside `grad_norm` in its log.",
    ),
    undetected="It adds settings and metrics, and no run has a wrong number without them.",
    numerics="None.",
    notes=("It patches ms-swift. If the package is not installed, the patch is pending.",),
    edits=(
        *(AddArgument(_ARGUMENTS, edit.field, edit.type, edit.default, edit.doc) for edit in _SETTINGS),
        Wrap(
            "swift.megatron.trainers.base:BaseMegatronTrainer.on_log",
            "megatron_overrides.frameworks.ms_swift:report_metrics",
        ),
    ),
)
