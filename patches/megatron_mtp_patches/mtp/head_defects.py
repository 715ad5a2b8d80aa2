"""MTP heads: what they are trained on, and which parameters their loss trains."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    fuses_weight_gradients,
    has_head_of_bridge,
    has_heads_on_last_stage,
    has_megatron_fsdp,
    is_layer_wise,
    pipeline_parallel,
    recomputes_heads,
    repeats_a_head,
)
from ..defects.declare import Defect, Sign

_MTP = "megatron.core.transformer.multi_token_prediction"
_SETUP = "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer"
_SELECTIVE = "--recompute-granularity selective, without --recompute-method and --recompute-num-layers"
_DETACHED = "megatron.core.transformer.transformer_config:TransformerConfig.mtp_detach_heads"


def _pads_packed_sequences(run: Any) -> bool:
    """True if Megatron-Bridge pads each packed sequence, and gives their lengths with the padding and without it."""
    specs = run.packed_sequence_specs or run.offline_packing_specs
    multiple = run.pad_seq_to_mult or getattr(specs, "pad_seq_to_mult", None)
    return isinstance(multiple, int) and multiple > 1


def _overlaps_in_ddp(run: Any) -> bool:
    """True if Megatron's DDP reduces gradients during backward; Megatron-FSDP has other buffers."""
    return bool(run.overlap_grad_reduce and not run.use_megatron_fsdp)


def _has_bucket_for_shared_embedding(run: Any) -> bool:
    """True if DDP lays buffers out for a distributed or a layer-wise optimizer, with a bucket for that weight alone."""
    is_laid_out_by_layer = is_layer_wise(run) and run.use_layer_wise_param_layout is not False
    return bool(run.use_distributed_optimizer or is_laid_out_by_layer)


def _has_unused_weight(run: Any) -> bool:
    """True if the last pipeline stage has MTP heads and takes the word embedding for the output layer."""
    return has_heads_on_last_stage(run) and pipeline_parallel(run) > 1 and not run.untie_embeddings_and_output_weights


def _stage_has_embedding_for_heads_alone(run: Any) -> bool:
    """True if a pipeline stage has a copy of the embedding that only its MTP heads use."""
    computes_logits = has_heads_on_last_stage(run) and not run.untie_embeddings_and_output_weights
    return bool(run.mtp_num_layers and pipeline_parallel(run) > 1 and not computes_logits)


def _loses_uses_of_output_weight(run: Any) -> bool:
    return bool(
        run.mtp_num_layers
        and has_megatron_fsdp(run)
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
        affects=lambda run: run.mtp_num_layers and _pads_packed_sequences(run),
        when="--mtp-num-layers with packed sequences in a trainer that gives `cu_seqlens_q` without their padding "
        "beside `cu_seqlens_q_padded`, as Megatron-Bridge does with pad_seq_to_mult > 1 and pretrain_gpt.py does not",
        more_links=("NVIDIA/Megatron-LM#4495", "NVIDIA/Megatron-LM#6205"),
        state="open",
        evidence="reproduced",
        patch="roll-padded-packed-sequences",
        second_reading="sources of all releases and of main, of their trainers' packs, of Megatron-Bridge and verl; "
        "the pull requests; its program",
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
        affects=lambda run: recomputes_heads(run) and run.fp8,
        when="--mtp-num-layers with --recompute-granularity full, --recompute-method uniform and --fp8-format",
        more_links=("NVIDIA/Megatron-LM#4765", "NVIDIA/Megatron-LM#4766"),
        state="fixed in 0.18.0",
        evidence="reproduced",
        instead=_SELECTIVE,
        patch="recompute-quantized-mtp-heads",
        seen_by="moves",
        second_reading="sources of 0.16.1 to main; its program; doctor with other recomputation",
    ),
    Defect(
        "ML-4593b",
        "Full activation recomputation of packed sequences ends in a TypeError in the first MTP head",
        kind="crash",
        severity=3,
        signs=Sign(f"{_MTP}:MultiTokenPredictionLayer._checkpointed_forward", lacks="custom_forward"),
        affects=lambda run: recomputes_heads(run) and run.sft is not False and not run.fp8,
        when="--mtp-num-layers with --recompute-granularity full, --recompute-method uniform and packed sequences "
        "(--sft), without --fp8-format",
        only_if="sequences are packed",
        state="fixed in 0.18.0",
        evidence="reproduced",
        instead=_SELECTIVE,
        patch="recompute-quantized-mtp-heads",
        second_reading="sources of 0.16.1 to main; its program; doctor with other recomputation",
    ),
    Defect(
        "ML-6965",
        "A repeated MTP head loses the gradients of all depths but one: in bf16 in the first step, in fp8 and fp4 in "
        "the first microbatch of each step",
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
        when="--use-megatron-fsdp with --mtp-num-layers, without --mtp-detach-heads, --freeze-base-model-for-mtp and "
        "--no-gradient-accumulation-fusion",
        evidence="reproduced",
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
        instead="leave out --overlap-moe-expert-parallel-comm",
        patch="detach-mtp-heads",
        second_reading="sources of 0.19.0 and main, and which tensors the schedule of overlapped experts detaches; "
        "its program",
    ),
    Defect(
        "detached-embedding",
        "An assertion of DDP fails in the second step, because the MTP stage's copy of the embedding has no gradient",
        kind="crash",
        severity=3,
        signs=Sign(_DETACHED),
        affects=lambda run: (
            _stage_has_embedding_for_heads_alone(run)
            and run.mtp_detach_heads
            and _overlaps_in_ddp(run)
            and not _has_bucket_for_shared_embedding(run)
        ),
        when="--mtp-num-layers with --mtp-detach-heads, --pipeline-model-parallel-size > 1 and --overlap-grad-reduce, "
        "without --use-distributed-optimizer, --use-megatron-fsdp and (unless with --no-use-layer-wise-param-layout) "
        "--optimizer dist_muon, where embeddings are untied or the heads are not on the last stage",
        introduced_by=("NVIDIA/Megatron-LM#3456",),
        evidence="reproduced",
        instead="--use-distributed-optimizer",
        patch="detach-mtp-heads",
        second_reading="sources of 0.19.0 and main; predicate with tied embeddings and heads on the last stage; its "
        "program, also with the distributed and the layer-wise optimizer",
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
        second_reading="sources of 0.19.0 and main; its program",
    ),
    Defect(
        "ML-5034",
        "The first stage and the MTP stage train their copies of the word embedding by different rules, and the copies "
        "drift apart",
        severity=4,
        signs=Sign(_SETUP, lacks="self.pre_process or getattr(self, 'mtp_process', False)"),
        affects=lambda run: (
            run.mtp_num_layers
            and pipeline_parallel(run) > 1
            and (run.decoupled_lr is not None or "muon" in str(run.optimizer))
        ),
        when="--mtp-num-layers with --pipeline-model-parallel-size > 1 and --decoupled-lr or --optimizer muon or "
        "dist_muon",
        state="fixed in 0.18.0",
        evidence="reproduced",
        patch="tag-mtp-stage-embedding",
        seen_by="copies",
        second_reading="sources of 0.16.1 to 0.18.2; the pull request; its program; doctor with --decoupled-lr and "
        "with Muon",
    ),
    Defect(
        "tied-output-weight-save",
        "Saving a checkpoint fails with an AssertionError, because the stage of the heads has an output weight that "
        "nothing uses",
        kind="crash",
        severity=3,
        signs=Sign(_SETUP, lacks="self.output_layer.weight = None"),
        affects=lambda run: _has_unused_weight(run) and run.save and (run.ckpt_format or "torch_dist") == "torch_dist",
        when="--mtp-num-layers with tied embeddings, --pipeline-model-parallel-size > 1 and --save in the format "
        "torch_dist, where the heads are on the last stage, as by default",
        more_links=("NVIDIA/Megatron-LM#7577",),
        state="open",
        evidence="reproduced",
        instead="--untie-embeddings-and-output-weights",
        patch="drop-unused-output-weight",
        second_reading="sources of 0.16.1 to main; the pull request; doctor with tied and untied embeddings; its "
        "program",
    ),
    Defect(
        "tied-output-weight-ddp",
        "An assertion of DDP fails in the second step, because an output weight that nothing uses has no gradient",
        kind="crash",
        severity=3,
        signs=Sign(_SETUP, lacks="self.output_layer.weight = None"),
        affects=lambda run: _has_unused_weight(run) and _overlaps_in_ddp(run),
        when="--mtp-num-layers with tied embeddings, --pipeline-model-parallel-size > 1 and --overlap-grad-reduce, "
        "without --use-megatron-fsdp, where the heads are on the last stage, as by default",
        more_links=("NVIDIA/Megatron-LM#7577",),
        state="open",
        evidence="reproduced",
        instead="--untie-embeddings-and-output-weights",
        patch="drop-unused-output-weight",
        second_reading="sources of 0.16.1 to main; the pull request; doctor with tied and untied embeddings and with "
        "Megatron-FSDP; its program, also with the distributed and the layer-wise optimizer",
    ),
)
