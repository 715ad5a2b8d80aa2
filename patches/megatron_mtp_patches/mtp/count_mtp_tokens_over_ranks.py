"""Declares count-mtp-tokens-over-ranks."""

from ..engine import AddIfMissing, Patch, PullRequest
from ..settings import CHECK_SETTINGS
from ..shared_edits import MTP, MTP_FORWARD_PASS, MTP_LOSS

PATCH = Patch(
    id="count-mtp-tokens-over-ranks",
    summary="Weight the tokens of MTP heads alike, however the sequences of a microbatch are cut over ranks",
    upstream=(PullRequest(7498), PullRequest(7513)),
    problem=(
        "Megatron counts the tokens of a head (one of its MTP layers) on each rank. Without "
        "`--calculate-per-token-loss` each context-parallel rank divides its part of the loss by its own tokens, and "
        "DDP averages the parts as if they had the same number. With it (from 0.17 on), a rank weights its tokens by "
        "its own ratio of main tokens to a head's tokens. A mask that lies unevenly over the ranks then weights "
        "tokens wrongly; so does a mask of ones, because the roll takes a token from one rank only. Per token, a "
        "rank whose main tokens are all masked loses the gradient of its heads."
    ),
    adds=(
        "A head's tokens are counted over all ranks that share a mean: the context-parallel ranks, or with "
        "`--calculate-per-token-loss` those over which `finalize_model_grads` adds up the tokens, data-parallel ranks "
        "among them. Within a microbatch the gradient of a position no longer depends on how sequences and masks lie "
        "on these ranks. Microbatches and, without a per-token loss, data-parallel replicas have a mean each, as in "
        "the main loss.",
        "The logged `mtp_N loss` is that mean.",
        "It costs one all-reduce of one number for the main model and one for each head (one for all heads with "
        "`e2e_tv`) in each microbatch that trains heads; none where the group has one rank.",
    ),
    refuses=("`--hybrid-context-parallel` with MTP heads, where ranks have different numbers of microbatches.",),
    numerics=(
        "With MTP heads and more than one context-parallel rank, or with `--calculate-per-token-loss` and more than "
        "one data-parallel rank: gradients and logged losses of the heads. Elsewhere every number stays as it is, to "
        "the bit. 0.16.1 does not weight heads by a ratio with `--calculate-per-token-loss`; its gradient stays, and "
        "its logged loss changes."
    ),
    notes=(
        "All ranks of the group need the same number of microbatches that train heads. Megatron's schedules have it; a "
        "trainer that runs a microbatch on one data-parallel rank alone with `config.calculate_per_token_loss` would "
        "hang.",
        "It repairs the heads alone. The main loss without `--calculate-per-token-loss` still has a mean for each "
        "context-parallel rank (NVIDIA/Megatron-LM#7513).",
        "verl's MTP models call Megatron's loss (from 0.17 on), so their heads are weighted so, too. So are those of "
        "ms-swift, by `train-heads-in-mcore-bridge`.",
    ),
    is_repair=True,
    edits=(
        AddIfMissing(f"{MTP}:sum_token_counts", "megatron_overrides.mtp.losses.token_counts:sum_token_counts"),
        *MTP_LOSS,
        *MTP_FORWARD_PASS,
        *CHECK_SETTINGS,
    ),
)
