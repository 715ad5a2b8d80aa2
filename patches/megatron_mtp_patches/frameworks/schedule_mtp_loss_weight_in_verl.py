"""Declares schedule-mtp-loss-weight-in-verl."""

from ..engine import Patch, Wrap

PATCH = Patch(
    id="schedule-mtp-loss-weight-in-verl",
    summary="Let a schedule of the MTP loss act in verl",
    package="verl",
    problem="verl has its own training loop, so it has to say which iteration a step is.",
    adds=(
        "`override_transformer_config.mtp_loss_scaling_schedule` acts in verl's TrainingWorker. An iteration is a step "
        "of its learning rate schedule: a training batch with all of its mini-batches.",
        "The weight in its metrics: `mtp_losses/mtp_loss_scaling_factor`.",
    ),
    refuses=("Points in per cent, because the length of the run is known to verl's trainer alone.",),
    undetected="Without it a run with a schedule ends in an error.",
    numerics="Only with a schedule.",
    notes=("It patches verl. If the package is not installed, the patch is pending.",),
    edits=(
        Wrap(
            "verl.workers.engine_workers:TrainingWorker.train_batch",
            "megatron_overrides.frameworks.verl:schedule_weight",
        ),
    ),
)
