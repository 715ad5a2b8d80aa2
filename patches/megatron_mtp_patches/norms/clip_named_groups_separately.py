"""Declares clip-named-groups-separately."""

from ..declarations.settings import Setting, optimizer_setting
from ..declarations.shared_edits import COPY_GRAD_NORM_TAGS, GRAD_NORMS, OPTIMIZER_STEP, ROUNDED_NORM, SHOW_METRICS
from ..engine import Patch, Wrap

PATCH = Patch(
    id="clip-named-groups-separately",
    summary="Clip named groups of parameters separately from all others",
    problem="One norm decides how far every gradient is scaled down. In NVIDIA/Megatron-LM#5431 the gradient norm of "
    "the `in_proj` weights of gated delta net is about 5e7: with `--clip-grad 1` all other gradients are multiplied "
    "by 2e-8, and the rest of the model stops learning.",
    adds=(
        "`OptimizerConfig.grad_norm_group`: the named parameters leave the main norm, and each group is clipped by "
        "its separate norm. MTP heads (Megatron's MTP layers) with a separate norm stay in their group, `mtp`.",
        "`optimizer.grad_norms_by_group[NAME]`, the norm of the last step; `NAME grad norm` in the log line, "
        "`NAME-grad-norm` in TensorBoard and W&B. All norms of a step come from one reduction.",
    ),
    undetected="No flag tells which module has gradients of another size.",
    refuses=(
        "A flag that cannot be read, and a name that is given to two groups. A REGEX that matches nothing on any rank "
        "is an error at the first step, on every rank.",
    ),
    numerics=(
        "With the flag, the named groups are clipped by their separate norms, and the reported grad norm no longer "
        f"includes them. {ROUNDED_NORM}"
    ),
    unasked=ROUNDED_NORM,
    notes=("Asked for in NVIDIA/Megatron-LM#5431 and NVIDIA-NeMo/RL#3698.",),
    edits=(
        *optimizer_setting(
            Setting(
                "grad_norm_group",
                list[str] | None,
                None,
                "Clip the parameters whose names match REGEX to LIMIT by the norm of their group alone (0: measure "
                "only). May be repeated; the first match wins.",
                check="megatron_overrides.norms.checks:check_named_groups",
                example=["name=regex:1"],
                metavar="NAME=REGEX:LIMIT",
            )
        ),
        Wrap(
            "megatron.core.optimizer:_get_param_groups",
            "megatron_overrides.norms.tags:tag_groups",
            check_source=False,
        ),
        COPY_GRAD_NORM_TAGS,
        *GRAD_NORMS,
        *OPTIMIZER_STEP,
        *SHOW_METRICS,
    ),
)
