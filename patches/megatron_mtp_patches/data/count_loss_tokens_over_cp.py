"""Declares count-loss-tokens-over-cp."""

from ..engine import Patch, PullRequest, Wrap

PATCH = Patch(
    id="count-loss-tokens-over-cp",
    summary="Weight all tokens of a microbatch alike under context parallelism",
    upstream=(PullRequest(7513),),
    problem="Without `--calculate-per-token-loss` each context-parallel rank divides the sum of its losses by its own "
    "number of tokens, and DDP averages the ranks. With a mask that is uneven over the sequence (`--sft`, "
    "`--eod-mask-loss`, padding) tokens on a rank with few of them count more, and a rank without any makes all "
    "gradients smaller. With two ranks and one token that counts, the gradient is half of what it is without "
    "context parallelism. Upstream's main has the same defect.",
    adds=(
        "A loss function that returns a sum and a number of tokens is divided by the tokens of all context-parallel "
        "ranks, so a token's gradient does not depend on how its sequence is cut. What is logged does not change.",
    ),
    numerics="With context parallelism and without `--calculate-per-token-loss`: the gradients, where ranks have "
    "different numbers of tokens that count. With the same number on each rank they are the same, bit for bit if the "
    "number of ranks is a power of two.",
    notes=(
        "One all-reduce of one number over the context-parallel ranks for each microbatch, on the last pipeline stage. "
        "Hybrid context parallelism is left alone.",
    ),
    is_repair=True,
    edits=(
        Wrap(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            "megatron_overrides.data.loss_tokens:divide_by_tokens_of_all_context_parallel_ranks",
        ),
    ),
)
