"""MTP heads: what they are trained on, and which parameters their loss trains."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    FUSES_UNDER_MEGATRON_FSDP,
    REFUSES_DEFERRED_GRADIENTS,
    WITHOUT_OVERLAP_OF_EXPERTS,
    context_parallel,
    fuses_weight_gradients,
    has_head_of_bridge,
    has_heads_of_trainer,
    has_megatron_fsdp,
    pipeline_parallel,
    recomputes_heads,
    repeats_a_head,
    tensor_parallel,
)
from ..defects.declare import Defect, Diff, Gap, Sign

_MTP = "megatron.core.transformer.multi_token_prediction"
_SELECTIVE = "--recompute-granularity selective, without --recompute-method and --recompute-num-layers"
_NO_OTHER_TRAINER = "but not in verl and ms-swift, which have their own recomputation of MTP layers"
_DETACHED = "megatron.core.transformer.transformer_config:TransformerConfig.mtp_detach_heads"


def _pads_packed_sequences(run: Any) -> bool:
    """True if Megatron-Bridge pads each packed sequence, and gives their lengths with the padding and without it."""
    specs = run.packed_sequence_specs or run.offline_packing_specs
    multiple = run.pad_seq_to_mult or getattr(specs, "pad_seq_to_mult", None)
    return (isinstance(multiple, int) and multiple > 1) or _pads_in_batches(run)


def _pads_in_batches(run: Any) -> bool:
    """True if Megatron-Bridge packs the sequences of a batch, and pads each for parallelism that splits it."""
    is_split = context_parallel(run) > 1 or (run.sequence_parallel and tensor_parallel(run) > 1)
    return bool(run.enable_in_batch_packing and not run.defer_in_batch_packing_to_step and is_split)


def _pads_rollouts(run: Any) -> bool:
    """True if train_rl.py packs sequences for context parallelism, which 0.19 does without padding."""
    is_before_main = run.rl_rollout_bank_max_bytes is None  # it has no such argument
    return bool(run.rl_use_sequence_packing and context_parallel(run) > 1 and not is_before_main)


def _loses_uses_of_output_weight(run: Any) -> bool:
    return bool(
        run.mtp_num_layers
        and has_megatron_fsdp(run)
        and pipeline_parallel(run) == 1  # over several stages Megatron-FSDP does not start: fsdp-pipeline-stages
        and not run.mtp_detach_heads
        and not run.freeze_base_model_for_mtp
        and fuses_weight_gradients(run)
    )


DEFECTS = (
    Defect(
        "ML-4494",
        "MTP heads train on tokens of other sequences and on padding, because packed sequences are rolled as if they "
        "had no padding",
        severity=4,
        signs=Sign(f"{_MTP}:_roll_tensor_packed_seq", has="cu_seqlens = packed_seq_params.cu_seqlens_q"),
        affects=lambda run: run.mtp_num_layers and (_pads_packed_sequences(run) or _pads_rollouts(run)),
        when="--mtp-num-layers with packed sequences in a trainer that gives `cu_seqlens_q` without their padding "
        "beside `cu_seqlens_q_padded`: Megatron-Bridge with pad_seq_to_mult > 1, or from 0.6 on with "
        "enable_in_batch_packing, without defer_in_batch_packing_to_step, and with context or sequence parallelism; "
        "train_rl.py of main with --rl-use-sequence-packing and --context-parallel-size > 1; not pretrain_gpt.py",
        instead="train without context parallelism, with pad_seq_to_mult 1 and without enable_in_batch_packing",
        more_links=("NVIDIA/Megatron-LM#4495", "NVIDIA/Megatron-LM#6205"),
        state="open",
        evidence="reproduced",
        patch="roll-padded-packed-sequences",
        unless=Gap(
            _pads_rollouts,
            when="--rl-use-sequence-packing",
            because="it takes a pack with a context-parallel size of its own for one without padding",
        ),
        second_reading="sources of all releases and of main, of their trainers' packs, train_rl.py's as well, of "
        "Megatron-Bridge 0.5.1 and 0.6.2 and verl; the pull requests; its program",
    ),
    Defect(
        "ML-3457",
        "Full activation recomputation ends in a TypeError about padding_mask in the first MTP head",
        kind="crash",
        severity=3,
        signs=Sign(
            f"{_MTP}:MultiTokenPredictionLayer.forward",
            has=("self._checkpointed_forward(", "padding_mask=padding_mask"),
        ),
        fixed_by=Sign(f"{_MTP}:MultiTokenPredictionLayer._checkpointed_forward", has="padding_mask"),
        affects=lambda run: run.mtp_num_layers and run.recompute_granularity == "full" and not has_head_of_bridge(run),
        when="--mtp-num-layers with --recompute-granularity full, without Megatron-Bridge and mcore-bridge",
        more_links=("NVIDIA/Megatron-LM#4933", "NVIDIA/Megatron-LM#6367"),
        introduced_by=("NVIDIA/Megatron-LM#2645", "NVIDIA/Megatron-LM#4593"),
        state="fixed in 0.19.0",
        evidence="reproduced",
        instead=_SELECTIVE,
        patch="derive-mtp-labels",
        second_reading="sources of 0.17.1 to main, the fixing commit and the issue; its program; doctor with other "
        "recomputation",
    ),
    Defect(
        "ML-4593",
        "MTP heads get no gradient and do not learn, because TransformerEngine's checkpoint does not see their "
        "tensors; with --overlap-grad-reduce an assertion of DDP fails in the second step, where a bucket has other "
        "parameters",
        severity=5,
        signs=Sign(f"{_MTP}:MultiTokenPredictionLayer._checkpointed_forward", lacks="custom_forward"),
        affects=lambda run: recomputes_heads(run) and run.fp8 and not has_heads_of_trainer(run),
        when="--mtp-num-layers with --recompute-granularity full, --recompute-method uniform and --fp8-format, "
        f"{_NO_OTHER_TRAINER}",
        more_links=("NVIDIA/Megatron-LM#4765", "NVIDIA/Megatron-LM#4766"),
        state="fixed in 0.18.0",
        evidence="reproduced",
        instead=_SELECTIVE,
        patch="recompute-quantized-mtp-heads",
        seen_by="moves",
        second_reading="sources of 0.16.1 to main, of verl and of mcore-bridge; its program; doctor with other "
        "recomputation",
    ),
    Defect(
        "ML-4593b",
        "Full activation recomputation of packed sequences ends in a TypeError in the first MTP head",
        kind="crash",
        severity=3,
        signs=Sign(f"{_MTP}:MultiTokenPredictionLayer._checkpointed_forward", lacks="custom_forward"),
        affects=lambda run: (
            recomputes_heads(run) and run.sft is not False and not run.fp8 and not has_heads_of_trainer(run)
        ),
        when="--mtp-num-layers with --recompute-granularity full, --recompute-method uniform and packed sequences "
        f"(--sft), without --fp8-format, {_NO_OTHER_TRAINER}",
        only_if="sequences are packed",
        state="fixed in 0.18.0",
        evidence="reproduced",
        instead=_SELECTIVE,
        patch="recompute-quantized-mtp-heads",
        second_reading="sources of 0.16.1 to main, of verl and of mcore-bridge; its program; doctor with other "
        "recomputation",
    ),
    Defect(
        "ML-6965",
        "A repeated MTP head loses the gradients of all depths but one: in bf16 in the first microbatch after each "
        "start, in fp8 and fp4 in the first one of each step",
        severity=4,
        signs=Sign(f"{_MTP}:MultiTokenPredictionBlock._build_layers", has="self.mtp_use_repeated_layer"),
        affects=lambda run: (
            repeats_a_head(run)
            and (run.transformer_impl or "transformer_engine") == "transformer_engine"
            and fuses_weight_gradients(run)
            and not run.use_megatron_fsdp
            and not (run.disable_parameter_transpose_cache or run.trains_adapters)
            and not recomputes_heads(run)  # a layer that runs again is not in its first microbatch any more
        ),
        when="--mtp-use-repeated-layer with --mtp-num-layers > 1 and layers of TransformerEngine, without "
        "--no-gradient-accumulation-fusion, disable_parameter_transpose_cache, --use-megatron-fsdp and "
        "--recompute-method uniform, but not where adapters of Megatron-Bridge train instead",
        state="fixed after main of 2026-08-22 in bf16, open in fp8 and fp4",
        evidence="reproduced",
        instead="--no-gradient-accumulation-fusion",
        patch="sum-gradients-of-repeated-weights",
        second_reading="sources of 0.17.1, 0.19.0 and main; the table of the pull request; its program, also with full "
        "recomputation",
    ),
    Defect(
        "fsdp-output-weight",
        "Under Megatron-FSDP the output weight of attached MTP heads keeps the gradient of only one of its uses",
        severity=4,
        signs=Sign(
            "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
            has="weight.main_grad = weight.get_main_grad()",
        ),
        affects=_loses_uses_of_output_weight,
        when="--use-megatron-fsdp with --mtp-num-layers, without pipeline parallelism, --mtp-detach-heads, "
        "--freeze-base-model-for-mtp and --no-gradient-accumulation-fusion",
        evidence="reproduced",
        only_if=FUSES_UNDER_MEGATRON_FSDP,
        instead="--no-gradient-accumulation-fusion",
        patch="sum-gradients-of-repeated-weights",
        second_reading="sources of 0.16.1, 0.19.0 and main; its program; validate_args of 0.17.1 to 0.19.2 with its "
        "way out; predicate just outside",
    ),
    Defect(
        "detached-overlap",
        "The MTP loss trains the main model although the heads are detached",
        severity=4,
        signs=Sign(_DETACHED),
        affects=lambda run: run.mtp_num_layers and run.mtp_detach_heads and run.overlap_moe_expert_parallel_comm,
        when="--mtp-num-layers with --mtp-detach-heads and --overlap-moe-expert-parallel-comm",
        introduced_by=("NVIDIA/Megatron-LM#3456",),
        evidence="reproduced",
        instead=WITHOUT_OVERLAP_OF_EXPERTS,
        patch="detach-mtp-heads",
        unless=REFUSES_DEFERRED_GRADIENTS,
        second_reading="sources of 0.19.0 and main, which tensors the schedule of overlapped experts detaches, and "
        "which settings need it; what the patch refuses; its program",
    ),
    Defect(
        "ML-6256",
        "The first MTP head ends in a RuntimeError, because the embedding is not scattered over the sequence-parallel "
        "ranks",
        kind="crash",
        severity=3,
        signs=Sign(f"{_MTP}:MultiTokenPredictionLayer._get_embeddings", lacks="scatter_to_sequence_parallel_region"),
        affects=lambda run: (
            run.mtp_num_layers and run.sequence_parallel and run.scatter_embedding_sequence_parallel is False
        ),
        when="--mtp-num-layers with --sequence-parallel in a multimodal model "
        "(scatter_embedding_sequence_parallel=False)",
        state="fixed on main",
        evidence="reproduced",
        patch="scatter-mtp-embeddings",
        diff=Diff(
            f"{_MTP}:MultiTokenPredictionLayer._get_embeddings",
            """
            if self.config.sequence_parallel and not getattr(embedding, "scatter_to_sequence_parallel", True):
                from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

                decoder_input = scatter_to_sequence_parallel_region(
                    decoder_input, group=getattr(self, "tp_group", None)
                )
            """,
            "after",
            "embedding(input_ids=input_ids, position_ids=position_ids)",
        ),
        second_reading="sources of 0.19.0 and main; its program",
    ),
)
