"""The losses of routers: their gradients, their scale and what is logged of them."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    HAS_PADDING_MASK,
    context_parallel,
    data_parallel,
    has_any_aux_loss,
    has_aux_loss,
    has_z_loss,
    heads_have_experts,
    may_mask_padding,
    microbatches,
    repeats_a_head,
    tensor_parallel,
)
from ..defects.declare import Defect, Diff, Sign

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_ATTACH = f"{_ROUTER}.attach_and_log_load_balancing_loss"
_Z_LOSS = f"{_ROUTER}.apply_z_loss"
_MOE_UTILS = "megatron.core.transformer.moe.moe_utils"
_Z_LOSS_FUNC = f"{_MOE_UTILS}:z_loss_func"


def _splits_sequence(run: Any) -> bool:
    return tensor_parallel(run) * context_parallel(run) > 1


DEFECTS = (
    Defect(
        id="ML-5047",
        effect="The gradients of the MoE auxiliary losses and of the z loss are TP x CP times too small, so experts "
        "are balanced less than the coefficients ask for",
        severity=4,
        signs=Sign(_ATTACH, has="MoEAuxLossAutoScaler.apply(activation, aux_loss * num_tokens)"),
        affects=lambda run: (
            run.calculate_per_token_loss and _splits_sequence(run) and (has_any_aux_loss(run) or has_z_loss(run))
        ),
        when="--calculate-per-token-loss with --tensor-model-parallel-size or --context-parallel-size > 1 and "
        "--moe-aux-loss-coeff or --moe-z-loss-coeff",
        only_if="the model gets no padding mask (Megatron's trainer gives it none), or has a z loss",
        instead="multiply --moe-aux-loss-coeff and --moe-z-loss-coeff by the product of --tensor-model-parallel-size "
        "and --context-parallel-size",
        more_links=("NVIDIA/Megatron-LM#1652",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="weight-moe-losses-by-token",
        second_reading="routers of 0.16.1, 0.18.2, 0.19.0 and main; its program; doctor of 0.17.1, 0.18.2 and 0.19.2 "
        "under its flags and just outside; the wrappers of its patch",
    ),
    Defect(
        id="ML-7481",
        effect="With a padding mask the gradients of the MoE auxiliary losses are TP x CP times as large as without "
        "one, that of global_aux_loss TP x CP x DP times",
        severity=4,
        signs=Sign(
            f"{_MOE_UTILS}:get_tokens_per_expert_and_token_count",
            has="global_tokens_per_expert = "
            "reduce_from_tensor_model_parallel_region(local_tokens_per_expert, reduce_group)\n"
            "if with_padding_mask:\n"
            "    local_num_tokens = local_tokens_per_expert.sum() / topk",
        ),
        # There the factor that is missing makes up for it.
        fixed_by=Sign(_ATTACH, has="MoEAuxLossAutoScaler.apply(activation, aux_loss * num_tokens)"),
        affects=lambda run: (
            may_mask_padding(run)
            and run.calculate_per_token_loss
            and has_any_aux_loss(run)
            and (_splits_sequence(run) or (has_aux_loss(run, "global_aux_loss") and data_parallel(run) > 1))
        ),
        when="--calculate-per-token-loss with --moe-aux-loss-coeff and --tensor-model-parallel-size or "
        "--context-parallel-size > 1, or with global_aux_loss and data parallelism",
        only_if=HAS_PADDING_MASK,
        more_links=("NVIDIA/Megatron-LM#7452",),
        state="open",
        evidence="reproduced",
        patch="count-moe-tokens-once",
        diff=Diff(
            "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
            "local_num_tokens = total_num_tokens / reduce_group.size()  # each rank's part of a loss weighs the same",
            "after",
            "global_tokens_per_expert.sum()",
        ),
        second_reading="routers and the counts of tokens of 0.18.2, 0.19.0 and main; its program on 0.19.2; the "
        "wrapper of its patch",
    ),
    Defect(
        id="ML-5007",
        effect="The gradient of global_aux_loss is as many times too small as there are data-parallel ranks, so the "
        "same coefficient balances experts less the more replicas there are",
        severity=4,
        signs=Sign(
            f"{_ROUTER}._apply_global_aux_loss",
            has=", reduce_group=self.tp_dp_cp_group",
            lacks=("dp_group.size()", "dp_size", "data_parallel"),
        ),
        affects=lambda run: has_aux_loss(run, "global_aux_loss") and data_parallel(run) > 1,
        when="--moe-router-load-balancing-type global_aux_loss with --moe-aux-loss-coeff and data parallelism",
        instead="multiply the coefficient of global_aux_loss by the data-parallel size",
        more_links=("NVIDIA/Megatron-LM#3672",),
        state="open",
        evidence="reproduced",
        patch="sum-global-aux-loss-over-replicas",
        setting="moe_global_aux_loss_over_data_parallel",
        second_reading="routers of 0.16.1, 0.18.2, 0.19.0 and main; its program; doctor under its flags and just "
        "outside; the wrapper of its patch",
    ),
    Defect(
        id="ML-5798",
        effect="The gradient of seq_aux_loss is --micro-batch-size times too small, so experts are balanced less than "
        "the coefficient asks for",
        severity=4,
        signs=Sign(
            f"{_ROUTER}._apply_seq_aux_loss", has=", valid_token_count=local_num_tokens", lacks="local_num_tokens * bsz"
        ),
        affects=lambda run: (
            has_aux_loss(run, "seq_aux_loss") and run.calculate_per_token_loss and (run.micro_batch_size or 1) > 1
        ),
        when="--moe-router-load-balancing-type seq_aux_loss with --moe-aux-loss-coeff, --calculate-per-token-loss and "
        "--micro-batch-size > 1",
        instead="use --micro-batch-size 1, or multiply the coefficient of seq_aux_loss by the micro batch size",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="weight-moe-losses-by-token",
        second_reading="routers of 0.16.1, 0.18.2, 0.19.0 and main; its program; doctor of 0.17.1, 0.18.2 and 0.19.2 "
        "under its flags and just outside; the wrappers of its patch",
    ),
    Defect(
        id="z-loss-of-each-rank",
        effect="The z loss of a padded sequence is the mean of the means of the ranks that share the sequence, so a "
        "token counts more on a rank with more padding",
        severity=2,
        signs=Sign(_Z_LOSS_FUNC, has="num_valid_tokens = valid_mask.sum()"),
        affects=lambda run: (
            may_mask_padding(run) and has_z_loss(run) and _splits_sequence(run) and not run.calculate_per_token_loss
        ),
        when="--moe-z-loss-coeff with --tensor-model-parallel-size or --context-parallel-size > 1, without "
        "--calculate-per-token-loss",
        only_if=HAS_PADDING_MASK,
        instead="use --calculate-per-token-loss, before 0.19 with the patch weight-moe-losses-by-token",
        evidence="reproduced",
        second_reading="the z loss of 0.16.1, 0.18.2 and main, with and without loss per token; its program on 0.18.2",
    ),
    Defect(
        id="z-loss-of-repeated-layer",
        effect="The z loss of a repeated MTP layer trains its router once for each pass, so the gradient is "
        "--mtp-num-layers times that of the mean over the passes",
        severity=3,
        signs=Sign(  # it divides after it has attached the loss to the logits
            _Z_LOSS,
            has="MoEAuxLossAutoScaler.apply(logits, z_loss) if self.is_mtp_layer and self.config.mtp_use_repeated",
        ),
        affects=lambda run: has_z_loss(run) and repeats_a_head(run) and heads_have_experts(run),
        when="--moe-z-loss-coeff with --mtp-use-repeated-layer and --mtp-num-layers > 1, where the MTP layer has "
        "experts",
        more_links=("NVIDIA/Megatron-LM#6748",),
        state="open",
        evidence="reproduced",
        second_reading="routers of 0.16.1, 0.17.1, 0.18.2, 0.19.0 and main; its program on 0.18.2; the text of #6748, "
        "which names it and leaves it",
    ),
    Defect(
        id="ML-7213",
        effect="global_aux_loss averages the expert counts over the microbatches of a step so far, but divides them by "
        "the number of tokens of the current one, so its gradient is too large in a short microbatch and too small in "
        "a long one",
        severity=3,
        signs=Sign(
            f"{_ROUTER}._apply_global_aux_loss",
            has=(
                "averated_tokens_per_expert = self.global_tokens_per_expert / self.ga_steps",
                ", total_num_tokens=total_num_tokens",
            ),
        ),
        affects=lambda run: (  # Megatron's trainer gives all microbatches --seq-length tokens a sample
            has_aux_loss(run, "global_aux_loss")
            and microbatches(run) > 1
            and (may_mask_padding(run) or run.hybrid_context_parallel)
        ),
        when="--moe-router-load-balancing-type global_aux_loss with --moe-aux-loss-coeff and more than one "
        "microbatch, in other trainers than Megatron's or with --hybrid-context-parallel",
        only_if="the microbatches have different numbers of tokens, because of a padding mask or of packed sequences",
        more_links=("NVIDIA/Megatron-LM#7214",),
        state="open",
        evidence="reproduced",
        patch="count-tokens-of-all-microbatches",
        diff=Diff(
            "megatron.core.transformer.moe.router:TopKRouter._apply_global_aux_loss",
            """
            # An expert's share is that of all tokens that were counted, not of as many as this microbatch has.
            counted = self.global_tokens_per_expert.sum()
            global_aux_loss = global_aux_loss * (total_num_tokens * self.topk * self.ga_steps / counted)
            """,
            "after",
            "switch_load_balancing_loss_func",
        ),
        second_reading="routers of 0.16.1, 0.18.2 and 0.19.0; what microbatches of Megatron's trainer have; its "
        "program; doctor under its flags and just outside; the wrapper of its patch; the thread of #7213",
    ),
    Defect(
        id="ML-5696",
        effect="seq_aux_loss mixes the samples of a micro batch, because it counts the tokens of this rank as if they "
        "were those of whole samples",
        severity=2,
        signs=Sign(
            "megatron.core.transformer.transformer_layer:", has="mbs = hidden_states.shape[0] // tokens_per_sample"
        ),
        affects=lambda run: (
            run.dataloader_inter_document_masking
            and has_aux_loss(run, "seq_aux_loss")
            and (run.micro_batch_size or 1) > 1
            and ((run.sequence_parallel and tensor_parallel(run) > 1) or context_parallel(run) > 1)
        ),
        when="--dataloader-inter-document-masking with --moe-router-load-balancing-type seq_aux_loss, "
        "--moe-aux-loss-coeff, --micro-batch-size > 1 and --sequence-parallel or --context-parallel-size > 1",
        instead="use --micro-batch-size 1",
        introduced_by=("NVIDIA/Megatron-LM#5696",),
        evidence="read",
        second_reading="layers, packs and pretrain_gpt.py of 0.19.0 and main",
    ),
    Defect(
        id="ML-6115",
        effect="seq_aux_loss balances experts over a pack of sequences, not over each sequence",
        severity=2,
        signs=Sign(
            f"{_ROUTER}._apply_seq_aux_loss",
            has="routing_map = routing_map.reshape(seq_length, -1)",
            lacks="sample_ids",
        ),
        affects=lambda run: run.sft and has_aux_loss(run, "seq_aux_loss"),
        when="--sft with --moe-router-load-balancing-type seq_aux_loss and --moe-aux-loss-coeff",
        only_if="several sequences are packed into one sample",
        state="open",
        evidence="reproduced",
        second_reading="routers of 0.16.1, 0.18.2 and 0.19.0, and the layers of 0.19.0 that undo packs of samples; "
        "doctor under its flags",
    ),
    Defect(
        id="ML-3199",
        effect="The logged z loss is that of one rank's part of each sequence, not the mean of all ranks that share it",
        kind="wrong log",
        severity=1,
        signs=Sign(_Z_LOSS, has="z_loss / moe_z_loss_coeff", lacks="avg_group"),
        affects=lambda run: has_z_loss(run) and _splits_sequence(run),
        when="--moe-z-loss-coeff with --tensor-model-parallel-size or --context-parallel-size > 1",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="routers and reductions of 0.16.1, 0.17.1, 0.18.2, 0.19.0 and main; doctor under its flags",
    ),
    Defect(
        id="ML-3199b",
        effect="The logged z loss is that of the logging rank's samples, not the mean over data-parallel ranks",
        kind="wrong log",
        severity=1,
        signs=Sign(
            f"{_MOE_UTILS}:reduce_aux_losses_tracker_across_ranks",
            has="""
                if tracker[name].get('reduce_group') is not None:
                    torch.distributed.all_reduce(values, group=tracker[name].get('reduce_group'))
                    if not tracker[name].get('reduce_group_has_dp', False):
                """,
        ),
        affects=lambda run: has_z_loss(run) and data_parallel(run) > 1,
        when="--moe-z-loss-coeff with data parallelism",
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="routers and reductions of 0.16.1, 0.17.1 and 0.18.2",
    ),
)
