"""Declares schedule-mtp-loss-weight-in-verl."""

from ..engine import Patch, Wrap

_OVERRIDES = "megatron_overrides.frameworks.verl_schedule"

PATCH = Patch(
    id="schedule-mtp-loss-weight-in-verl",
    summary="Let a schedule of the MTP loss act in verl",
    package="verl",
    problem="verl has its own training loop, so it has to say which iteration a step is.",
    adds=(
        "`override_transformer_config.mtp_loss_scaling_schedule` acts in verl's TrainingWorker. An iteration is a step "
        "of its learning rate schedule: a training batch with all of its mini-batches.",
        "After verl has loaded a checkpoint, the schedule goes on where it was saved, also with "
        "`use_checkpoint_opt_param_scheduler=false`, verl's default, which starts the learning rate again.",
        "The weight in its metrics: `mtp_losses/mtp_loss_scaling_factor`.",
    ),
    refuses=("Points in per cent, because the length of the run is known to verl's trainer alone.",),
    undetected="Without it a run with a schedule ends in an error.",
    numerics="Only with a schedule.",
    notes=(
        "It patches verl. If the package is not installed, the patch is pending.",
        "Where a checkpoint has no state of the optimizer beside that of the model, as with Megatron-FSDP, and without "
        "`use_checkpoint_opt_param_scheduler`, the schedule does not continue. A line in the log says so.",
    ),
    edits=(
        Wrap("verl.workers.engine_workers:TrainingWorker.train_batch", f"{_OVERRIDES}:schedule_weight"),
        Wrap(
            "verl.workers.engine.megatron.transformer_impl:MegatronEngine.load_checkpoint",
            f"{_OVERRIDES}:continue_schedule",
            check_source=False,
        ),
    ),
)
