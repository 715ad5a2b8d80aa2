"""Declares schedule-mtp-loss-weight-in-megatron-bridge."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="schedule-mtp-loss-weight-in-megatron-bridge",
    summary="Let a schedule of the MTP loss act in Megatron-Bridge",
    package="Megatron-Bridge",
    problem="Megatron-Bridge has its own training loop, so it has to say which iteration a step is.",
    adds=(
        "`model.mtp_loss_scaling_schedule` acts in its `pretrain` and `finetune`. Per cent are those of "
        "`train.train_samples`, else of `train.train_iters`.",
    ),
    undetected="Without it a run with a schedule ends in an error.",
    numerics="Only with a schedule.",
    notes=("It patches Megatron-Bridge. If the package is not installed, the patch is pending.",),
    edits=(
        Wrap(
            "megatron.bridge.training.train:train_step",
            "megatron_overrides.frameworks.bridge:schedule_weight",
            check_source=False,
        ),
    ),
)
