"""Declares schedule-mtp-loss-weight."""

from ..declarations.settings import Setting, model_setting
from ..declarations.shared_edits import MTP_LOSS, MTP_TRACKER, SHOW_METRICS
from ..engine import Patch, Wrap

_CHECK = "megatron_overrides.mtp.loss_weight.checks:check_schedule"

PATCH = Patch(
    id="schedule-mtp-loss-weight",
    summary="Change the weight of the MTP loss in the course of a run",
    problem="DeepSeek-V3 weights the MTP loss by 0.3 in the first part of its training and by 0.1 in the rest. "
    "Megatron has one weight for the whole run, `--mtp-loss-scaling-factor`, so such a run has to be stopped, and "
    "resumed with another flag, in the right iteration.",
    adds=(
        "`--mtp-loss-scaling-schedule 0:0.3,60%:0.1` takes the place of `--mtp-loss-scaling-factor`. A point is in per "
        "cent of the run (of `--train-samples`, else of `--train-iters`), or in iterations: from `5000` on is the step "
        "that the log calls iteration 5001.",
        "`--mtp-loss-scaling-schedule-style`: `step` keeps the weight of a point until the next point, `linear` goes "
        "there in a straight line. After the last point the weight stays.",
        "The weight of each step in the log line, TensorBoard and W&B: `mtp loss scaling factor`.",
        "A warning where the schedule hardly acts: the heads are detached, so the weight scales only their own "
        "gradients, and the updates of Adam or Muon do not depend on the size of gradients.",
    ),
    undetected="No flag tells which weight the MTP loss should have.",
    refuses=(
        "Points that do not begin at 0 and ascend, are over 100 %, are partly in per cent and partly in iterations, or "
        "are in per cent where the trainer has no number of iterations or samples; a weight that is negative or not "
        "finite.",
        "A schedule without MTP heads, with `--disable-mtp-loss`, with a CUDA graph of the whole iteration, or under a "
        "trainer whose iterations the patches do not know.",
    ),
    numerics="Only with a schedule. One with a single weight trains as `--mtp-loss-scaling-factor`, to the bit.",
    notes=("`config.mtp_loss_scaling_factor` is the weight of the current step; what it was set to has no effect.",),
    edits=(
        *model_setting(
            Setting(
                "mtp_loss_scaling_schedule",
                str | None,
                None,
                "Weights of the MTP loss in the course of the run, START:WEIGHT,..., in place of "
                "--mtp-loss-scaling-factor. START is a number of iterations, or a percentage of the run.",
                check=_CHECK,
                example="0:0.3,60%:0.1",
            )
        ),
        *model_setting(
            Setting(
                "mtp_loss_scaling_schedule_style",
                str,
                "step",
                "How the weight of the MTP loss gets from one point of its schedule to the next: step or linear.",
                choices=("step", "linear"),
                example="linear",
            )
        ),
        *MTP_LOSS,
        *MTP_TRACKER,
        *SHOW_METRICS,
        Wrap(
            "megatron.training.training:train_step",
            "megatron_overrides.mtp.loss_weight.trainer_step:schedule_weight",
            check_source=False,
        ),
    ),
)
