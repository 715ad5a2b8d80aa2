"""Declares sum-global-aux-loss-over-replicas."""

from ..declarations.settings import Setting, model_setting
from ..engine import Patch, PullRequest, Wrap

PATCH = Patch(
    id="sum-global-aux-loss-over-replicas",
    summary="Let global_aux_loss act as its coefficient says however many replicas there are",
    upstream=(
        PullRequest(5007, part="its loss and what is logged of it; it needs a flag, because it changes tuned runs"),
    ),
    problem="global_aux_loss balances experts over the tokens of all data-parallel ranks: each rank has the part of "
    "the loss that its own tokens make. The parts have to be added up, but their gradients are averaged as all "
    "others are. So with N replicas the gradient is 1/N of what the coefficient says: the same coefficient balances "
    "less the more replicas there are. The logged loss looks right.",
    adds=(
        "`--moe-global-aux-loss-over-data-parallel` (`config.moe_global_aux_loss_over_data_parallel`): the gradient is "
        "that of the loss over the tokens of all ranks, and does not depend on how many ranks there are.",
    ),
    refuses=(
        "The flag in a model with experts whose `--moe-router-load-balancing-type` does not name global_aux_loss.",
    ),
    numerics="Only with the flag: the gradients of global_aux_loss are larger by the data-parallel size. Divide a "
    "coefficient that was tuned on N replicas by N. The logged loss stays as it is.",
    notes=("No collective and no host-device sync is added.",),
    edits=(
        *model_setting(
            Setting(
                "moe_global_aux_loss_over_data_parallel",
                bool,
                False,
                "Add up the gradients of global_aux_loss over the data-parallel ranks, which Megatron averages.",
                check="megatron_overrides.moe.checks:check_global_aux_loss",
                in_ms_swift=True,
            )
        ),
        Wrap(
            "megatron.core.transformer.moe.router:TopKRouter._apply_global_aux_loss",
            "megatron_overrides.moe.router_losses:sum_over_replicas",
        ),
    ),
)
