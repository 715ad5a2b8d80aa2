"""Declares clip-mtp-grads-separately."""

from ..declarations.settings import Setting, model_setting, optimizer_setting
from ..declarations.shared_edits import (
    COPY_GRAD_NORM_TAGS,
    GRAD_NORMS,
    MTP,
    OPTIMIZER,
    OPTIMIZER_STEP,
    ROUNDED_NORM,
    SHOW_METRICS,
)
from ..engine import Override, Patch, Probe, PullRequest, Wrap

_WRAPPERS = "megatron_overrides.norms.tags"
_GROUPS = "megatron_overrides.norms.groups"
_NORMS = "megatron_overrides.norms.measuring"
_BASE = f"{OPTIMIZER}:MegatronOptimizer"

PATCH = Patch(
    id="clip-mtp-grads-separately",
    summary="Clip MTP gradients separately from the main model's",
    upstream=(PullRequest(4116, native_since="0.19.0"),),
    problem="One gradient norm for all parameters decides how far each gradient is clipped. Gradients of the MTP heads "
    "(Megatron's MTP layers) that have another magnitude over-clip or under-clip the main model, and the other "
    "way round. In a small GPT the main model keeps 70 % of its gradient where detached heads share its norm, and "
    "81 % where they have a separate norm.",
    adds=(
        '`param.grad_norm_group == "mtp"` and `param.is_mtp_param` on the parameters of MTP heads, if these are '
        "detached (`--mtp-detach-heads`) or `--separate-mtp-grad-clip` is given.",
        'The separate norm of the heads: `optimizer.grad_norms_by_group["mtp"]` and `optimizer.mtp_grad_norm`; `mtp '
        "grad norm` in the log line, `mtp-grad-norm` in TensorBoard and W&B.",
    ),
    repairs=(
        "In a chain of [LayerWise, DistributedOptimizer] the norm of the heads was reduced over the wrong ranks, "
        "which then clipped differently.",
        "`clip_grad_norm` entered a collective only on ranks that own parameters; these ranks then waited for the "
        "others.",
        "MimoOptimizer clipped the heads by a norm that does not include them.",
        "The tag was lost with Megatron-FSDP, and on parameters that are created again after initialisation on the "
        "meta device.",
        "Heads that joined the optimizer after its first step (`add_param_group`) were in no norm and not clipped "
        "(0.19.2, main). Each step measures what the optimizer owns then.",
        "A step took two or more all-reduces (0.19). Now it takes one for each group of ranks that share an "
        "optimizer, whatever the number of norms.",
    ),
    refuses=(
        "`--mtp-clip-grad` or `--mtp-grad-norm-skip-threshold` where nothing clips the heads separately: neither "
        "`--mtp-detach-heads` nor `--separate-mtp-grad-clip` is given.",
    ),
    numerics="Tagged parameters are clipped by a separate norm, and the reported grad norm no longer includes them. "
    f"{ROUNDED_NORM}",
    unasked=ROUNDED_NORM,
    probe=Probe(f"{OPTIMIZER}:copy_optimizer_param_metadata"),
    edits=(
        *model_setting(
            Setting(
                "separate_mtp_grad_clip",
                bool,
                False,
                "Clip MTP gradients separately from the main model's without detaching the heads.",
                in_ms_swift=True,
            )
        ),
        *optimizer_setting(
            Setting(
                "mtp_clip_grad",
                float | None,
                None,
                "Clip MTP gradients to this norm, where they are clipped separately (none: to --clip-grad; 0: do not "
                "clip them).",
                check="megatron_overrides.norms.checks:check_limit",
            )
        ),
        *optimizer_setting(
            Setting(
                "mtp_grad_norm_skip_threshold",
                float | None,
                None,
                "Skip the update of the MTP heads alone when their separate gradient norm exceeds this or is NaN "
                "(none: as --grad-norm-skip-threshold; inf: never skip).",
                check="megatron_overrides.norms.checks:check_threshold",
            )
        ),
        # tags
        Wrap(f"{MTP}:MultiTokenPredictionBlock.__init__", f"{_WRAPPERS}:tag_block", check_source=False),
        Wrap("megatron.core.optimizer:_get_param_groups", f"{_WRAPPERS}:retag_mtp_heads", check_source=False),
        COPY_GRAD_NORM_TAGS,
        *(
            Override(f"{OPTIMIZER}:{name}", f"{_GROUPS}:{name}", where="missing")
            for name in (
                "MTP_GRAD_NORM_GROUP",
                "GRAD_NORM_GROUP_ATTR",
                "SEPARATE_GRAD_NORM_GROUPS",
                "copy_optimizer_param_metadata",
            )
        ),
        # norms
        *GRAD_NORMS,
        Override(f"{_BASE}.has_grad_norm_group", f"{_NORMS}:has_grad_norm_group", where="missing"),
        Override(f"{_BASE}.mtp_grad_norm", f"{_NORMS}:mtp_grad_norm", where="missing"),
        *OPTIMIZER_STEP,
        *SHOW_METRICS,
    ),
)
