"""Clip the gradients of the MTP heads by a norm of their own.

Upstream: NVIDIA/Megatron-LM#4116, native since 0.19.0.
Without it: one norm for all. Gradients of the heads, of another size than the trunk's, decide how far the trunk is
    clipped, and the other way round.
Adds: `param.grad_norm_group = "mtp"` (and `is_mtp_param`) on the heads with --mtp-detach-heads, or without detaching
    them with `--separate-mtp-grad-clip`; `optimizer.grad_norms_by_group`, `optimizer.mtp_grad_norm`;
    `--mtp-clip-grad X`, their own limit (default: --clip-grad);
    `--mtp-grad-norm-skip-threshold X`: over it, or NaN, the update of the heads alone is dropped (default:
    --grad-norm-skip-threshold; inf: never, as upstream). The norm of the heads in the log line, TensorBoard and W&B.
Repairs, where native: a nested LayerWise optimizer reduced the norm of the heads over the wrong ranks, so that ranks
    clipped differently;
    a rank without parameters did not enter the reduction of clip_grad_norm, in which the others waited;
    MimoOptimizer clipped the heads by the norm from which they are missing;
    with Megatron-FSDP, or parameters made anew after initialisation on the meta device, no tag was left;
    two or more reductions for each step: now one for each set of ranks that share an optimizer.
Changes numbers: for tagged parameters, and grad norm no longer counts them. The sum of several reductions (dense and
    expert parameters) is rounded once instead of twice.
"""

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

_LIMIT = "Clip the gradients of MTP heads with a norm of their own to this norm; without it, to --clip-grad."
_THRESHOLD = (
    "Drop the update of MTP heads with a norm of their own where it is larger than this or NaN; without it, the "
    "threshold is --grad-norm-skip-threshold; inf: never."
)

PATCH = Patch(
    id="clip-mtp-grads-separately",
    doc=__doc__,
    upstream=(PullRequest(4116, native_since="0.19.0"),),
    probe=Probe(f"{OPTIMIZER}:copy_optimizer_param_metadata"),
    repairs=True,
    edits=(
        AddField(
            TRANSFORMER_CONFIG,
            field="separate_mtp_grad_clip",
            type=bool,
            default=False,
            doc="Clip the gradients of the MTP heads by their own norm, as --mtp-detach-heads does, without detaching.",
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
