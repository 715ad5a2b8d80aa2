"""Declares order-param-groups-alike."""

from ..engine import Patch, PullRequest, Wrap

PATCH = Patch(
    id="order-param-groups-alike",
    summary="Create the parameter groups of dense weights and experts in the same order on all ranks",
    upstream=(PullRequest(6616),),
    problem="Megatron sorts parameter groups by their settings. Groups of dense weights and of experts with the same "
    "settings stay in the order in which a rank meets them. A pipeline stage whose dense weights are frozen meets "
    "experts first. From 0.18 on the optimizers of Muon, SOAP and Lion are made and called in this order, so ranks "
    "wait for each other in different collectives; before, the groups of a checkpoint are those of the first rank.",
    adds=("Dense weights come before experts, on all ranks.",),
    numerics="None; runs that hung train.",
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.optimizer:_get_param_groups",
            "megatron_overrides.parallelism.param_groups:order_groups_alike",
        ),
    ),
)
