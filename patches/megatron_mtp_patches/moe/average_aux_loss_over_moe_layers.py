"""Declares average-aux-loss-over-moe-layers."""

from ..declarations.shared_edits import MTP, divide_aux_losses
from ..engine import Patch, Probe, PullRequest, Wrap

PATCH = Patch(
    id="average-aux-loss-over-moe-layers",
    summary="Log MoE auxiliary losses as their mean over MoE layers, and count that of a repeated hybrid head once",
    upstream=(PullRequest(6748, native_since="main"),),
    problem="The trainer logs the sum of the auxiliary losses of all routers, divided by the number of MoE layers. It "
    "takes each MTP head for one, even if heads have no experts, and each pass of a repeated head, whose losses "
    "already are divided by the number of its passes. It counts the heads of a hybrid model twice. The logged "
    "loss is then too small. The routers of a hybrid model's heads do not know that they belong to a head: they "
    "put their losses into the slots of the main model, and a repeated head trains with its auxiliary loss as "
    "many times as it has passes.",
    adds=(
        "`track_moe_metrics` and `MoEMetricsTracker.report` take `num_moe_layers`, the number that they divide by.",
        "Routers in the heads of a hybrid model have `is_mtp_layer`, and put their losses into the slot of their head.",
        "A pipeline stage of a hybrid model without MoE layers reduces as many slots as the others do.",
    ),
    repairs=(
        "On main, a router in the head of a hybrid model takes its place in the pattern of the head for the depth. If "
        "there are fewer depths than that, as with `M*E/*E`, training ends in an IndexError. With this patch the "
        "number of the router is the depth.",
    ),
    numerics="The logged auxiliary losses, where they were divided by a wrong number. The gradient changes only for a "
    "repeated head of a hybrid model with experts (0.17 to 0.19): its auxiliary loss counts once, as in a GPT. "
    "The gradient of the z-loss is not touched.",
    notes=(
        "A trainer other than Megatron-LM's own, Megatron-Bridge's and ms-swift's passes `num_moe_layers` to get the "
        "right mean.",
    ),
    is_repair=True,
    probe=Probe(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report", contains="num_moe_layers is None"
    ),
    edits=(
        *divide_aux_losses("average_over_moe_layers"),
        Wrap(f"{MTP}:MultiTokenPredictionLayer.__init__", "megatron_overrides.moe.logged_losses:mark_routers_of_head"),
    ),
)
