"""Declares count-moe-tokens-once."""

from ..engine import Patch, PullRequest, Wrap

# The count is read in the router alone, under the name that it has there.
COUNT_TOKENS_ONCE = Wrap(
    "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
    "megatron_overrides.moe.router_losses:count_tokens_once",
)

PATCH = Patch(
    id="count-moe-tokens-once",
    summary="Weight MoE auxiliary losses by the tokens of one rank, not of its group, where there is a padding mask",
    upstream=(PullRequest(7481, part="each rank of a group has the same weight, also if their padding differs"),),
    problem="With a padding mask and `--calculate-per-token-loss` a router takes the tokens of all tensor- and "
    "context-parallel ranks for its own, because the all-reduce of its counts is in place. On 0.19.2 and main the "
    "gradients of the auxiliary losses are too large by the number of these ranks, those of global_aux_loss by the "
    "data-parallel ones as well. Megatron's own trainer passes no mask; Megatron-Bridge, NeMo-RL and verl do.",
    adds=(
        "A router weights its loss with the mean number of tokens of the ranks in its group. The gradients are those "
        "of a run without `--calculate-per-token-loss`.",
    ),
    numerics="With a padding mask and `--calculate-per-token-loss`: the gradients of the auxiliary losses.",
    notes=("On 0.16 to 0.18 it goes together with `weight-moe-losses-by-token`: leave out both or neither.",),
    is_repair=True,
    edits=(COUNT_TOKENS_ONCE,),
)
