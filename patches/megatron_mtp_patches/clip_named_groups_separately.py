"""Clip the gradients of named groups of parameters separately from all others.

Upstream: none; asked for in NVIDIA/Megatron-LM#5431 and NVIDIA-NeMo/RL#3698.
Without it: one norm decides how far every gradient is scaled down. In #5431 the gradient norm of gated delta net's
    `in_proj` is about 5e7, and the rest of the model, clipped by it, stops learning.
Adds: `OptimizerConfig.grad_norm_group` and `--grad-norm-group NAME=REGEX:LIMIT`, which may be repeated. Parameters
    whose name matches REGEX leave the main norm and are clipped to LIMIT by the norm of their group (0: measured and
    not clipped). The first match wins, and MTP heads with a separate norm come before all. A regex that matches
    nothing on any rank is an error at the first step. `optimizer.grad_norms_by_group[NAME]`; each norm is in the
    training log, TensorBoard and W&B. All norms come from the one reduction of a step.
Changes numbers: with the flag, and grad norm no longer counts the named groups.
"""

from .engine import Patch, Wrap
from .shared_edits import (
    CHECK_SETTINGS,
    COPY_GRAD_NORM_TAGS,
    GRAD_NORMS,
    OPTIMIZER_STEP,
    SHOW_METRICS,
    add_optimizer_setting,
)

PATCH = Patch(
    id="clip-named-groups-separately",
    doc=__doc__,
    upstream=(),
    probe=None,
    edits=(
        *add_optimizer_setting(
            "grad_norm_group",
            list[str] | None,
            None,
            "NAME=REGEX:LIMIT: clip the gradients of the parameters whose names match REGEX to LIMIT by their separate "
            "norm (0: measure only); may be repeated, the first match wins.",
        ),
        *CHECK_SETTINGS,
        Wrap(
            "megatron.core.optimizer:_get_param_groups",
            "megatron_overrides.core.optimizer:tag_groups",
            check_source=False,
        ),
        COPY_GRAD_NORM_TAGS,
        *GRAD_NORMS,
        *OPTIMIZER_STEP,
        *SHOW_METRICS,
    ),
)
