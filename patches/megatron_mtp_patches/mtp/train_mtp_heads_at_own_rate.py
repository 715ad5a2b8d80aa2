"""Declares train-mtp-heads-at-own-rate."""

from ..declarations.settings import Setting, optimizer_setting
from ..engine import Patch, Wrap

_CHECK = "megatron_overrides.mtp.rates.checks:check_rates"

PATCH = Patch(
    id="train-mtp-heads-at-own-rate",
    summary="Give MTP heads a separate learning rate and weight decay",
    problem="MTP heads train with the learning rate and the weight decay of the main model. New heads on a trained "
    "model need a higher rate than it, and heads that are trained alone often another schedule; draft trainers "
    "(NeMo-RL, Automodel, SpecForge) have one, Megatron has none.",
    adds=(
        "`--mtp-lr`, `--mtp-min-lr` and `--mtp-weight-decay`: the parameters of heads are separate groups in the "
        "optimizer and in its schedule, whichever optimizer it is. Warm-up and decay are those of the run.",
        "`--mtp-lr` takes the place of `--lr` before the multiplier of muP, and precedence over `--decoupled-lr`. "
        "`--mtp-weight-decay` stays the same in the course of the run; biases and norms have none, as before.",
    ),
    undetected="No flag tells which learning rate the heads should have.",
    refuses=("A number below 0, inf or NaN, and a lowest learning rate above the highest one.",),
    numerics="Only with a flag: the updates of the heads.",
    notes=(
        "An embedding or output layer that the heads share with the main model keeps its rate.",
        "The logged learning rate is the main model's, or the heads' if they train alone.",
        "Megatron-Bridge's log has the learning rate of the heads.",
    ),
    edits=(
        *optimizer_setting(
            Setting("mtp_lr", float | None, None, "Learning rate of MTP heads (none: that of --lr).", check=_CHECK)
        ),
        *optimizer_setting(
            Setting(
                "mtp_min_lr",
                float | None,
                None,
                "Lowest learning rate of MTP heads (none: that of --min-lr).",
                check=_CHECK,
            )
        ),
        *optimizer_setting(
            Setting(
                "mtp_weight_decay",
                float | None,
                None,
                "Weight decay of MTP heads (none: that of --weight-decay).",
                check=_CHECK,
            )
        ),
        Wrap(
            "megatron.core.optimizer:_get_param_groups",
            "megatron_overrides.mtp.rates.head_groups:separate_groups_of_heads",
        ),
    ),
)
