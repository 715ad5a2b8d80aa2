"""MTP heads: how much their loss counts."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import context_parallel, data_parallel, has_heads_of_trainer, masks_loss, microbatches
from ..defects.declare import Defect, Gap, Sign

_MTP_LOSS = "megatron.core.transformer.multi_token_prediction:process_mtp_loss"
_GPT_LOSS = "megatron.core.models.gpt.gpt_model:GPTModel._postprocess"
_RATIO_OF_RANK = (Sign(_MTP_LOSS, has="original_num_tokens / num_tokens_safe"),)
_MEAN_OF_RANK = tuple(Sign(target, has="= roll_tensor(loss_mask") for target in (_MTP_LOSS, _GPT_LOSS))
_MASKS = "--sft, --eod-mask-loss or --dataloader-inter-document-masking"
# With the last of them the loss of MTP layers alone leaves out the end of each document.
_NO_MASKS = "without --sft, --eod-mask-loss and --dataloader-inter-document-masking"
_MEGATRONS_LOSS = "but not in verl and ms-swift, which have their own loss of MTP layers there"
_UNEVEN = "the positions that the MTP loss leaves out lie unevenly over the ranks"
_DEALS_OUT_SEQUENCES = Gap(
    lambda run: run.hybrid_context_parallel,
    when="--hybrid-context-parallel",
    because="it refuses MTP heads there",
)


def _cuts_sequences_per_token(run: Any) -> bool:
    return bool(run.mtp_num_layers and run.calculate_per_token_loss and context_parallel(run) > 1)


def _cuts_sequences_with_a_mean(run: Any) -> bool:
    return bool(run.mtp_num_layers and not run.calculate_per_token_loss and context_parallel(run) > 1)


DEFECTS = (
    Defect(
        id="ML-3396",
        effect="The logged loss of MTP heads is NaN; without --calculate-per-token-loss all gradients are NaN as well: "
        "the run ends, with a dynamic loss scale it skips the step, and where nothing checks for NaN the weights "
        "become NaN",
        severity=3,
        signs=Sign(_GPT_LOSS, has="mtp_loss_scale * mtp_loss / num_tokens"),
        affects=lambda run: (
            run.mtp_num_layers and (run.sft is not False or run.eod_mask_loss) and not has_heads_of_trainer(run)
        ),
        when=f"--mtp-num-layers with a mask of the loss (--sft, --eod-mask-loss), {_MEGATRONS_LOSS}",
        only_if="a microbatch, or a context-parallel rank's part of one, has no token that counts for a head",
        state="fixed in 0.17.0",
        evidence="reproduced",
        patch="count-mtp-tokens-over-ranks",
        unless=_DEALS_OUT_SEQUENCES,
        seen_by="finite",
        second_reading="sources of 0.16.1 to main, and what checks gradients for NaN there, also in fp16 and under "
        "Megatron-FSDP; the losses of verl and mcore-bridge; the pull request",
    ),
    Defect(
        id="ML-3159",
        effect="MTP heads count less in the loss than asked for, because their sum over fewer tokens is divided by the "
        "number of tokens of the main model: by 1/4096 for the first head if all of 4,096 tokens count",
        severity=2,
        signs=Sign(_GPT_LOSS, has="MTPLossAutoScaler.apply(hidden_states, mtp_loss_scale * mtp_loss)"),
        affects=lambda run: run.mtp_num_layers and run.calculate_per_token_loss and not has_heads_of_trainer(run),
        when=f"--mtp-num-layers with --calculate-per-token-loss, {_MEGATRONS_LOSS}",
        only_if="the first positions of sequences count in the loss, as they do in pretraining",
        more_links=("NVIDIA/Megatron-LM#2417",),
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1 and 0.17.1, each with its trainer; which positions a rolled mask leaves out; "
        "the losses of verl and mcore-bridge; the pull request and the issue",
    ),
    Defect(
        "ML-7498",
        "With a per-token loss each context-parallel rank scales its MTP loss by its own ratio of main tokens to MTP "
        "tokens, so a token counts more on one rank than on another, and not at all on a rank without main tokens",
        severity=3,
        signs=_RATIO_OF_RANK,
        affects=lambda run: _cuts_sequences_per_token(run) and masks_loss(run),
        when=f"--mtp-num-layers with --calculate-per-token-loss, --context-parallel-size > 1 and {_MASKS}",
        only_if=_UNEVEN,
        state="open",
        evidence="reproduced",
        patch="count-mtp-tokens-over-ranks",
        unless=_DEALS_OUT_SEQUENCES,
        second_reading="sources of 0.16.1 to main, and what masks the loss there; the pull request; its program; "
        "doctor with and without masks; what the patch refuses",
    ),
    Defect(
        "ML-7498b",
        "With a per-token loss each context-parallel rank scales its MTP loss by its own ratio of main tokens to MTP "
        "tokens, so a token counts slightly more on the rank where a sequence ends (in the first head by 1/2000 if "
        "that rank has 2,000 tokens of a sequence)",
        severity=1,
        signs=_RATIO_OF_RANK,
        affects=lambda run: _cuts_sequences_per_token(run) and not masks_loss(run),
        when=f"--mtp-num-layers with --calculate-per-token-loss and --context-parallel-size > 1, {_NO_MASKS}",
        state="open",
        evidence="reproduced",
        patch="count-mtp-tokens-over-ranks",
        unless=_DEALS_OUT_SEQUENCES,
        second_reading="sources of 0.16.1 to main, and what masks the loss there; the pull request; doctor with and "
        "without masks",
    ),
    Defect(
        "ML-7452c",
        "With a per-token loss each microbatch scales its MTP loss by its own ratio of main tokens to MTP tokens, so "
        "the gradients of MTP heads depend on the micro-batch size",
        severity=2,
        signs=_RATIO_OF_RANK,
        affects=lambda run: (
            run.mtp_num_layers
            and run.calculate_per_token_loss
            and masks_loss(run)
            and max(microbatches(run), data_parallel(run)) > 1
        ),
        when=f"--mtp-num-layers with --calculate-per-token-loss and {_MASKS}, and several microbatches or replicas",
        only_if="the microbatches have different ratios",
        more_links=("NVIDIA/Megatron-LM#7498",),
        state="open",
        evidence="reproduced",
        instead="compare runs with the same --micro-batch-size: upstream's NVIDIA/Megatron-LM#7498 keeps this loss",
        second_reading="sources of 0.17.1 to main, and what masks the loss there; the issue and the pull request; its "
        "program",
    ),
    Defect(
        "ML-7513b",
        "Each context-parallel rank divides its MTP loss by its own number of tokens, so gradients and logged losses "
        "of MTP heads depend on how sequences and masks lie on the ranks",
        severity=3,
        signs=_MEAN_OF_RANK,
        affects=lambda run: _cuts_sequences_with_a_mean(run) and masks_loss(run),
        when=f"--mtp-num-layers with --context-parallel-size > 1 and {_MASKS}, without --calculate-per-token-loss",
        only_if=_UNEVEN,
        more_links=("NVIDIA/Megatron-LM#7498",),
        state="open",
        evidence="reproduced",
        patch="count-mtp-tokens-over-ranks",
        second_reading="sources of 0.16.1 to main, and what masks the loss there; verl 0.9.1, which calls "
        "process_mtp_loss where there is one; the pull requests, of which #7498 alone is about MTP; its program; "
        "doctor with and without masks",
    ),
    Defect(
        "ML-7513c",
        "Each context-parallel rank divides its MTP loss by its own number of tokens, so a token counts slightly more "
        "on the rank where a sequence ends (in the first head by 1/2000 if that rank has 2,000 tokens of a sequence)",
        severity=1,
        signs=_MEAN_OF_RANK,
        affects=lambda run: _cuts_sequences_with_a_mean(run) and not masks_loss(run),
        when=f"--mtp-num-layers with --context-parallel-size > 1, without --calculate-per-token-loss, and {_NO_MASKS}",
        more_links=("NVIDIA/Megatron-LM#7498",),
        state="open",
        evidence="reproduced",
        patch="count-mtp-tokens-over-ranks",
        second_reading="sources of 0.16.1 to main, and what masks the loss there; the pull requests, of which #7498 "
        "alone is about MTP; doctor with and without masks",
    ),
)
