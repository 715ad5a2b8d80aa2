"""Declares clip-mtp-grads-separately."""

from .engine import AddField, AddIfMissing, Patch, Probe, PullRequest, Wrap
from .shared_edits import (
    CHECK_SETTINGS,
    COPY_GRAD_NORM_TAGS,
    DEFAULT_IN_YAML,
    GRAD_NORMS,
    MTP,
    MTP_OVERRIDES,
    OPTIMIZER,
    OPTIMIZER_STEP,
    SHOW_METRICS,
    TRANSFORMER_CONFIG,
    add_optimizer_setting,
)

_GROUPS = "megatron_overrides.support.norm_groups"
_NORMS = "megatron_overrides.core.optimizer.clip_grads"
_BASE = f"{OPTIMIZER}:MegatronOptimizer"

_LIMIT = (
    "Clip MTP gradients to this norm, where they are clipped separately (none: to --clip-grad; 0: do not clip them)."
)
_THRESHOLD = (
    "Skip the update of the MTP heads alone when their separate gradient norm exceeds this or is NaN "
    "(none: as --grad-norm-skip-threshold; inf: never skip)."
)

PATCH = Patch(
    id="clip-mtp-grads-separately",
    summary="Clip MTP gradients separately from the main model's",
    upstream=(PullRequest(4116, native_since="0.19.0"),),
    problem=(
        "One global norm clips everything: MTP gradients of another magnitude over-clip or under-clip the main model, "
        "and the other way round. In the demo the main model keeps 70 % of its gradient instead of 81 %."
    ),
    adds=(
        '`param.grad_norm_group = "mtp"` and `param.is_mtp_param` on heads that are detached, or that '
        "`--separate-mtp-grad-clip` names.",
        "`optimizer.grad_norms_by_group` and `optimizer.mtp_grad_norm`; the norm of the heads in the log line, "
        "TensorBoard and W&B.",
    ),
    repairs=(
        "With a nested LayerWise optimizer the norm of the heads was reduced over the wrong ranks, which then clipped "
        "differently.",
        "A rank without parameters did not enter the reduction of `clip_grad_norm`, in which the others waited.",
        "MimoOptimizer clipped the heads by the norm from which they are missing.",
        "The tag was lost with Megatron-FSDP, and on parameters that are created again after initialisation on the "
        "meta device.",
        "A step took two or more reductions; now it takes one for each set of ranks that share an optimizer.",
    ),
    refuses=("A limit or threshold of the heads where nothing clips them separately.",),
    numerics=(
        "For tagged parameters, and grad norm no longer counts them. A norm that took several reductions (of dense "
        "and expert parameters) is rounded once instead of twice."
    ),
    probe=Probe(f"{OPTIMIZER}:copy_optimizer_param_metadata"),
    edits=(
        AddField(
            TRANSFORMER_CONFIG,
            field="separate_mtp_grad_clip",
            type=bool,
            default=False,
            doc="Clip MTP gradients separately from the main model's without detaching the heads.",
        ),
        *add_optimizer_setting("mtp_clip_grad", float | None, None, _LIMIT),
        *add_optimizer_setting("mtp_grad_norm_skip_threshold", float | None, None, _THRESHOLD),
        DEFAULT_IN_YAML,
        *CHECK_SETTINGS,
        # tags
        Wrap(f"{MTP}:MultiTokenPredictionBlock.__init__", f"{MTP_OVERRIDES}.tags:tag_block", check_source=False),
        Wrap(
            "megatron.core.optimizer:_get_param_groups",
            "megatron_overrides.core.optimizer:retag_mtp_heads",
            check_source=False,
        ),
        COPY_GRAD_NORM_TAGS,
        *(
            AddIfMissing(f"{OPTIMIZER}:{name}", f"{_GROUPS}:{name}")
            for name in (
                "MTP_GRAD_NORM_GROUP",
                "GRAD_NORM_GROUP_ATTR",
                "SEPARATE_GRAD_NORM_GROUPS",
                "copy_optimizer_param_metadata",
            )
        ),
        # norms
        *GRAD_NORMS,
        AddIfMissing(f"{_BASE}.has_grad_norm_group", f"{_NORMS}:has_grad_norm_group"),
        AddIfMissing(f"{_BASE}.mtp_grad_norm", f"{_NORMS}:mtp_grad_norm"),
        *OPTIMIZER_STEP,
        *SHOW_METRICS,
    ),
)
