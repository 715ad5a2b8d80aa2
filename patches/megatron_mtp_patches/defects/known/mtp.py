"""MTP heads: how much their loss counts."""

from __future__ import annotations

from ..declare import Defect, Sign

_GPT_LOSS = "megatron.core.models.gpt.gpt_model:GPTModel._postprocess"

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
        patch="count-mtp-tokens-over-ranks",
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
    ),
)
