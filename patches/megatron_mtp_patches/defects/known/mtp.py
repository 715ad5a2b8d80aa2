"""Known defects of MTP heads."""

from __future__ import annotations

from ..conditions import context_parallel, data_parallel
from ..declare import Defect, Sign

_GPT_LOSS = "megatron.core.models.gpt.gpt_model:GPTModel._postprocess"
_MTP = "megatron.core.transformer.multi_token_prediction"
_COUNTS_TOKENS = "count-mtp-tokens-over-ranks"

DEFECTS = (
    Defect(
        id="ML-3396",
        effect="The loss of MTP heads is NaN, and without --calculate-per-token-loss all gradients become NaN",
        kind="wrong numbers",
        severity=3,
        signs=(Sign(_GPT_LOSS, has="mtp_loss_scale * mtp_loss / num_tokens"),),
        affects=lambda run: run.mtp_num_layers and (run.sft or run.eod_mask_loss),
        when="--mtp-num-layers with --sft or --eod-mask-loss",
        only_if="a microbatch, or a context-parallel rank's part of one, has no token that counts for a head",
        links=("NVIDIA/Megatron-LM#3396",),
        state="fixed in 0.17.0",
        evidence="read",
        patch=_COUNTS_TOKENS,
    ),
    Defect(
        id="ML-7498",
        effect=(
            "Ranks with different numbers of tokens weight the tokens of MTP heads by their own counts, so the "
            "gradients of the heads depend on how sequences and masks lie on the ranks"
        ),
        kind="wrong numbers",
        severity=3,
        signs=(
            Sign(
                f"{_MTP}:process_mtp_loss",
                has="mtp_loss_scale * mtp_loss * (original_num_tokens / num_tokens_safe)",
                lacks="all_reduce",
            ),
        ),
        affects=lambda run: (
            run.mtp_num_layers and run.calculate_per_token_loss and max(context_parallel(run), data_parallel(run)) > 1
        ),
        when="--mtp-num-layers and --calculate-per-token-loss with data or context parallelism",
        only_if="ranks have different numbers of tokens that count",
        links=("NVIDIA/Megatron-LM#7498", "NVIDIA/Megatron-LM#7452"),
        state="open",
        evidence="read",
        patch=_COUNTS_TOKENS,
    ),
    Defect(
        id="ML-3159",
        effect=(
            "MTP heads count less in the loss than asked for, because their sum over fewer tokens is divided by the "
            "number of tokens of the main model"
        ),
        kind="wrong numbers",
        severity=2,
        signs=(Sign(_GPT_LOSS, has="MTPLossAutoScaler.apply(hidden_states, mtp_loss_scale * mtp_loss)"),),
        affects=lambda run: run.mtp_num_layers and run.calculate_per_token_loss,
        when="--mtp-num-layers with --calculate-per-token-loss",
        links=("NVIDIA/Megatron-LM#3159",),
        state="fixed in 0.17.0",
        evidence="read",
        patch=_COUNTS_TOKENS,
    ),
)
