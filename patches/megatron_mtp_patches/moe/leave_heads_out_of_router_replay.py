"""Declares leave-heads-out-of-router-replay."""

from ..declarations.shared_edits import MTP
from ..engine import Patch, Probe, PullRequest, Wrap

_REPLAY = "megatron.core.transformer.moe.router_replay:RouterReplay"
_OVERRIDES = "megatron_overrides.moe.router_replay"

PATCH = Patch(
    id="leave-heads-out-of-router-replay",
    summary="Replay the routes of the main model's experts where the model has MTP heads",
    upstream=(PullRequest(7404),),
    problem="With `moe_enable_routing_replay` (rollout routing replay, R3) `RouterReplay` keeps one list of all "
    "routers, those of MTP heads (Megatron's MTP layers) among them. Routes that an inference engine has recorded "
    "have no heads, so `set_replay_data` raises ValueError. Heads that do not run record None, with which the "
    "dynamic inference engine of 0.19 ends in a TypeError and a replay in an AttributeError.",
    adds=(
        "The routers of heads are not in the list, so `set_replay_data` takes and `get_recorded_data` gives the layers "
        "of the main model on this pipeline stage, and no action of `RouterReplay` changes how heads route.",
        "A list that is longer is refused in a sentence: routes of heads would be ignored.",
    ),
    numerics="With `moe_enable_routing_replay` and heads with experts: their routes are always their own.",
    notes=(
        "NeMo-RL (#3903) and miles (#608) leave the heads out by themselves, and verl (#7805) replays the routes of "
        "the decoder; verl's own class of routes is left as it is.",
    ),
    is_repair=True,
    probe=Probe(f"{_REPLAY}.replay_instances"),
    edits=(
        Wrap(
            f"{MTP}:MultiTokenPredictionBlock.__init__", f"{_OVERRIDES}:route_heads_by_themselves", check_source=False
        ),
        Wrap(f"{_REPLAY}.set_replay_data", f"{_OVERRIDES}:refuse_routes_of_heads"),
    ),
)
