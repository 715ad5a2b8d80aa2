"""Declares count-tokens-of-all-microbatches."""

from ..engine import Patch, PullRequest, Wrap

PATCH = Patch(
    id="count-tokens-of-all-microbatches",
    summary="Divide the expert counts of global_aux_loss by the tokens that were counted",
    upstream=(PullRequest(7214),),
    problem="global_aux_loss adds up how many tokens of a step each expert got, and divides by the number of "
    "microbatches so far and by the tokens of the current one. With a padding mask or packed sequences, whose "
    "microbatches have different numbers of tokens, the loss and its gradients are too large in a short microbatch "
    "and too small in a long one.",
    adds=("An expert's share is its part of all tokens that were counted. The log shows the loss of these shares.",),
    numerics="With `--moe-router-load-balancing-type global_aux_loss` and microbatches of different lengths: the loss "
    "and its gradients, from the second microbatch of a step on. With equal lengths they are the same.",
    notes=("No collective and no host-device sync is added.",),
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.transformer.moe.router:TopKRouter._apply_global_aux_loss",
            "megatron_overrides.moe.router_losses:weight_experts_by_all_tokens",
        ),
    ),
)
