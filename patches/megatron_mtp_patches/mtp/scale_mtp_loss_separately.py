"""Declares scale-mtp-loss-separately."""

from collections.abc import Callable

from ..declarations.settings import DEFAULT_IN_YAML
from ..engine import AddField, Override, Patch, Probe, PullRequest, Wrap

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_OVERRIDES = "megatron_overrides.mtp.losses.loss_scale"

PATCH = Patch(
    id="scale-mtp-loss-separately",
    summary="Scale the MTP loss separately from the main loss",
    upstream=(PullRequest(3459, native_since="0.19.0"),),
    problem="The loss of the MTP heads (Megatron's MTP layers) takes `config.grad_scale_func`. A trainer that scales "
    "its main loss (RL frameworks fold advantages or token counts into it) scales the MTP loss as well, or has to "
    "patch the schedule.",
    adds=(
        "`config.mtp_grad_scale_func`, a function without arguments that is called in every microbatch. It returns "
        "the scale of the MTP loss: a number or a tensor of one element. None (the default) keeps `grad_scale_func`.",
    ),
    undetected="It needs a function in the configuration, and no flag sets one.",
    numerics="Only with `mtp_grad_scale_func` set. It replaces `grad_scale_func` for the MTP loss; the weight "
    "`--mtp-loss-scaling-factor` still applies. With fp16 it must return the loss scale of the optimizer as well; "
    "otherwise the gradients of the heads are divided by a scale that they never had.",
    notes=(
        "Backward reads the scale from one place for the whole process. With pipeline parallelism the forward of the "
        "next microbatch may run before that backward, so the scale must not differ between microbatches.",
    ),
    probe=Probe(f"{_SCHEDULES}:_get_mtp_loss_scale"),
    edits=(
        AddField(
            "megatron.core.model_parallel_config:ModelParallelConfig",
            field="mtp_grad_scale_func",
            type=Callable | None,
            default=None,
            doc="Returns the scale of the MTP loss, a number or a tensor of one element (None: that of the main loss).",
            is_upstream=True,
        ),
        Override(f"{_SCHEDULES}:_get_mtp_loss_scale", f"{_OVERRIDES}:_get_mtp_loss_scale", where="missing"),
        Wrap(f"{_SCHEDULES}:forward_step_calc_loss", f"{_OVERRIDES}:scale_mtp_loss"),
        Wrap(
            "megatron.training.argument_utils:ArgumentGroupFactory.__init__",
            f"{_OVERRIDES}:exclude_callable_fields",
            check_source=False,
        ),
        DEFAULT_IN_YAML,
    ),
)
