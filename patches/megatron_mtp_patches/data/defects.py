"""Batches and losses: packed sequences, context parallelism and fine-tuning."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    context_parallel,
    has_middle_stages,
    is_hybrid,
    pipeline_parallel,
    tensor_parallel,
)
from ..defects.declare import Defect, Diff, Sign

_TRAINING = "megatron.training"
_BATCH = f"{_TRAINING}.utils:get_batch_on_this_tp_rank"
_SFT_DATA = f"{_TRAINING}.datasets.sft_dataset:"
# 0.17: only the ranks that read the data know where sequences end.
_LAST_STAGE_HAS_NO_ENDS = Sign(
    _BATCH,
    has=(
        "elif mpu.is_pipeline_last_stage(): tokens = None position_ids = None cu_seqlens = None max_seqlen = None",
        "cu_seqlens = _broadcast_cu_seqlens()",
    ),
    lacks="_broadcast(attention_mask) def _broadcast_cu_seqlens():",  # 0.16 tells all ranks once more
)


def _splits_packs(run: Any) -> bool:
    return bool(run.sft and tensor_parallel(run) > 1)


DEFECTS = (
    Defect(
        id="ML-4103",
        effect="On the last pipeline stage all tensor-parallel ranks but the first let tokens attend to other packed "
        "sequences, so the heads of attention disagree about where sequences end",
        severity=4,
        signs=_LAST_STAGE_HAS_NO_ENDS,
        affects=lambda run: (
            _splits_packs(run) and pipeline_parallel(run) == 2 and not has_middle_stages(run) and not run.mtp_num_layers
        ),
        when="--sft with --tensor-model-parallel-size > 1 and --pipeline-model-parallel-size 2, without virtual stages "
        "or --mtp-num-layers",
        instead="train without pipeline parallelism",
        state="fixed in 0.18.0",
        evidence="reproduced",
        seen_by="batch",
        second_reading="the batches of 0.16.1, 0.17.1 and 0.18.2, for each pipeline stage and tensor-parallel rank; "
        "which ranks of 0.17.1 read data; doctor under its flags and just outside on 0.17.1",
    ),
    Defect(
        id="ML-4103b",
        effect="The first step ends in an error, because tensor-parallel ranks of the middle pipeline "
        "stages are not told where packed sequences end",
        kind="crash",
        severity=3,
        signs=_LAST_STAGE_HAS_NO_ENDS,
        affects=lambda run: _splits_packs(run) and has_middle_stages(run),
        when="--sft with --tensor-model-parallel-size > 1 and --pipeline-model-parallel-size > 2, or with "
        "virtual stages",
        instead="train without pipeline parallelism",
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="the batches of 0.16.1, 0.17.1 and 0.18.2, for each pipeline stage, virtual ones as well; which "
        "ranks of 0.17.1 read data; doctor under its flags and just outside on 0.17.1",
    ),
    Defect(
        id="ML-4103c",
        effect="The first step ends in an error, because packed sequences are divided over context-parallel ranks by "
        "ends with padding, which the data set for fine-tuning does not give",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.utils:get_thd_batch_on_this_cp_rank",
            has="tex.thd_get_partitioned_indices(cu_seqlens_padded,",
        ),
        affects=lambda run: (
            run.sft and context_parallel(run) > 1 and not run.hybrid_context_parallel and not is_hybrid(run)
        ),
        when="--sft in a GPT with --context-parallel-size > 1, without --hybrid-context-parallel",
        instead="train without context parallelism",
        state="fixed in 0.18.0",
        evidence="reproduced",
    ),
    Defect(
        id="ML-7513",
        effect="Each context-parallel rank divides its loss by its own number of tokens, so tokens on ranks with few "
        "tokens count more, and a rank without any makes all gradients too small",
        severity=4,
        signs=Sign(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            has=("output_tensor /= torch.clamp(num_tokens, min=1)", "output_tensor *= cp_group_size"),
            lacks="all_reduce",
        ),
        affects=lambda run: (
            context_parallel(run) > 1 and not run.calculate_per_token_loss and (run.sft or run.eod_mask_loss)
        ),
        when="--context-parallel-size > 1 with --sft or --eod-mask-loss, without --calculate-per-token-loss",
        only_if="the ranks have different numbers of tokens that count",
        instead="add --calculate-per-token-loss; then MTP layers need the patch count-mtp-tokens-over-ranks, and MoE "
        "losses before 0.19 the patch weight-moe-losses-by-token",
        more_links=("NVIDIA/Megatron-LM#7452",),
        state="open",
        evidence="reproduced",
        patch="count-loss-tokens-over-cp",
        diff=Diff(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            """
            # A microbatch's mean is one over its tokens on all context-parallel ranks.
            is_mean = not config.calculate_per_token_loss and not getattr(config, "hybrid_context_parallel", False)
            if is_mean and cp_group_size > 1:
                wrapped = model
                while hasattr(wrapped, "module"):
                    wrapped = wrapped.module
                cp_group = getattr(wrapped, "cp_group", None)
                if cp_group is None:
                    cp_group = parallel_state.get_context_parallel_group(check_initialized=False)
                if cp_group is not None and cp_group.size() > 1:
                    num_tokens = num_tokens.to(output_tensor.device, copy=True)
                    torch.distributed.all_reduce(num_tokens, group=cp_group)
                    output_tensor = output_tensor * cp_group.size()
            """,
            "before",
            "config.calculate_per_token_loss",
        ),
        second_reading="schedules and loss functions of 0.16.1, 0.18.2 and 0.19.0; what validate_args of 0.16.1 to "
        "main refuses; its program; doctor of 0.17.1 and 0.19.2 under its flags and just outside",
    ),
    Defect(
        id="inter-document-masking-with-cp",
        effect="Each context-parallel rank takes its part of the whole sequence, but attention takes the documents for "
        "sequences, so tokens have wrong positions and attend to the wrong ones",
        severity=4,
        signs=Sign(
            "megatron.core.utils:get_batch_on_this_cp_rank",
            has="if use_per_sequence_balancing or batch.get('cu_seqlens') is None:",
        ),
        affects=lambda run: run.dataloader_inter_document_masking and not run.sft and context_parallel(run) > 1,
        when="--dataloader-inter-document-masking with --context-parallel-size > 1, without --sft",
        more_links=("NVIDIA/Megatron-LM#6156", "NVIDIA/Megatron-LM#5531"),
        state="open",
        instead="leave out --dataloader-inter-document-masking, or train without --context-parallel-size",
        evidence="reproduced",
        second_reading="pretrain_gpt.py, the data set and the split of batches of 0.19.0 and main; its program on "
        "0.19.2; doctor under its flags and just outside; the thread of #6156",
    ),
    Defect(
        id="ML-3268",
        effect="The first batch hangs, or ends in an error about shapes, because tensor-parallel ranks disagree about "
        "what they broadcast",
        kind="hang",
        severity=3,
        signs=Sign(_BATCH, has=("if args.sft:", "_broadcast_cu_seqlens(batch['cu_seqlens'])")),
        affects=lambda run: _splits_packs(run) and not run.hybrid_context_parallel,
        when="--sft with --tensor-model-parallel-size > 1, without --hybrid-context-parallel",
        instead="train without tensor parallelism",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="the broadcasts of 0.16.1, rank by rank, and of 0.17.1; the commit of #3268; doctor under its "
        "flags",
    ),
    Defect(
        id="ML-3185",
        effect="The data set for fine-tuning ends in a TypeError where it cuts a pack to the sequence length",
        kind="crash",
        severity=3,
        signs=Sign(_SFT_DATA, has="pack_tokens.extend(pad)"),
        affects=lambda run: run.sft,
        when="--sft",
        only_if="the conversations of a pack have more tokens than --seq-length",
        instead="choose a --seq-length that the longest pack fits into",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="the data set of 0.16.1 and 0.17.1, for packs that are shorter, as long and longer; the commit "
        "of #3185",
    ),
    Defect(
        id="ML-3526",
        effect="The model learns an end-of-document token after each conversation that its template does not ask for",
        severity=2,
        signs=Sign(_SFT_DATA, has="if tokens_list[-1] != eod:"),
        affects=lambda run: run.sft,
        when="--sft",
        only_if="the template of conversations does not end in that token",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="the data set of 0.16.1 and 0.17.1, its loss mask included; the commit of #3526",
    ),
    Defect(
        id="ML-6682",
        effect="The loss counts all tokens of a conversation, also those of its system, user and tool turns, so the "
        "model is trained on its prompts",
        severity=4,
        signs=Sign(
            "megatron.core.tokenizers.text.libraries.sft_tokenizer:SFTTokenizer.tokenize_conversation",
            has="if self._prompt_format in ['default', 'identity']:",
        ),
        affects=lambda run: run.sft and run.sft_tokenizer_prompt_format == "identity",
        when="--sft with --sft-tokenizer-prompt-format identity",
        state="fixed on main",
        introduced_by=("NVIDIA/Megatron-LM#4450",),
        evidence="reproduced",
        patch="mask-prompts-of-identity-format",
        diff=Diff(
            "megatron.core.tokenizers.text.libraries.sft_tokenizer:SFTTokenizer.tokenize_conversation",
            'self._prompt_format == "default"',
            "instead of",
            'self._prompt_format in ["default", "identity"]',
        ),
        second_reading="the tokenizer of 0.17.1 to main; the commits of #4450 and #6682; its program; the wrapper of "
        "its patch",
    ),
)
