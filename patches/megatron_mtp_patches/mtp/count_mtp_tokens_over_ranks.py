"""Declares count-mtp-tokens-over-ranks."""

from ..declarations.settings import CHECK_SETTINGS
from ..declarations.shared_edits import MTP, MTP_FORWARD_PASS, MTP_LOSS
from ..engine import Override, Patch, PullRequest

PATCH = Patch(
    id="count-mtp-tokens-over-ranks",
    summary="Weight the tokens of MTP heads alike, however context-parallel ranks cut the sequences of a microbatch",
    upstream=(PullRequest(7498), PullRequest(7513)),
    problem="Megatron counts the tokens of a head (one of its MTP layers) on each rank, but context-parallel ranks "
    "have parts of the same sequences. Without `--calculate-per-token-loss` each of them divides its part of the "
    "loss by its own tokens, and DDP averages the parts as if they had the same number. With it (from 0.17 on), a "
    "rank weights its tokens by its own ratio of main tokens to a head's tokens. A mask that lies unevenly over the "
    "ranks then weights tokens wrongly; so does, slightly, a mask of ones, because the roll takes a token from one "
    "rank only. Per token, a rank whose main tokens are all masked loses the gradient of its heads.",
    adds=(
        "A head's tokens are counted over the context-parallel ranks, which share the sequences of a microbatch. Each "
        "microbatch of each replica has one mean, so at a given micro-batch size the gradient of a position depends "
        "neither on the context-parallel nor on the data-parallel size.",
        "The logged `mtp_N loss` is the average of these means; it depends on neither size.",
        "It costs one all-reduce of one number for the main model and one for each head (one for all heads with "
        "`e2e_tv`) in each microbatch that trains heads; none where the group has one rank.",
    ),
    refuses=(
        "`--hybrid-context-parallel` with MTP heads. It deals each sequence to a separate group of ranks, but "
        "Megatron's heads roll over the context-parallel group of the model.",
    ),
    numerics="With MTP heads and more than one context-parallel rank: gradients and logged losses of the heads. "
    "Elsewhere every number stays as it is, to the bit. 0.16.1 does not weight heads by a ratio with "
    "`--calculate-per-token-loss`; there its gradient stays, and its logged loss changes.",
    notes=(
        "The micro-batch size still matters, as in the releases and in NVIDIA/Megatron-LM#7498: the sequences of one "
        "microbatch share a mean. With a per-token loss and a mask that is ML-7452c, which `doctor` names.",
        "It repairs the heads alone. The main loss without `--calculate-per-token-loss` still has a mean for each "
        "context-parallel rank (NVIDIA/Megatron-LM#7513).",
        "verl's MTP models call Megatron's loss where Megatron has `process_mtp_loss`: from 0.17 on, and with the "
        "patches on 0.16, where they add it (not run there). Their heads are weighted in the same way. ms-swift always "
        "has its own loss, which has the defects until `train-heads-in-mcore-bridge` (on by default) replaces it by "
        "this one.",
    ),
    is_repair=True,
    edits=(
        Override(
            f"{MTP}:sum_token_counts", "megatron_overrides.mtp.losses.token_counts:sum_token_counts", where="missing"
        ),
        *MTP_LOSS,
        *MTP_FORWARD_PASS,
        *CHECK_SETTINGS,
    ),
)
