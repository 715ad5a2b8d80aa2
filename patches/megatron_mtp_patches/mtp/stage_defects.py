"""MTP heads on pipeline stages: their copies of the embedding, and an output weight that nothing uses."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    REFUSES_DEFERRED_GRADIENTS,
    has_heads_on_last_stage,
    has_torch_dist_format,
    pipeline_parallel,
)
from ..defects.declare import Defect, Diff, Sign

_SETUP = "megatron.core.models.common.language_module.language_module:LanguageModule.setup_embeddings_and_output_layer"
_DETACHED = "megatron.core.transformer.transformer_config:TransformerConfig.mtp_detach_heads"


def _overlaps_in_ddp(run: Any) -> bool:
    """True if Megatron's DDP reduces gradients during backward; Megatron-FSDP has other buffers."""
    return bool(run.overlap_grad_reduce and not run.use_megatron_fsdp)


def _has_unused_weight(run: Any) -> bool:
    """True if the last pipeline stage has MTP heads and takes the word embedding for the output layer."""
    return has_heads_on_last_stage(run) and pipeline_parallel(run) > 1 and not run.untie_embeddings_and_output_weights


def _stage_has_embedding_for_heads_alone(run: Any) -> bool:
    """True if a pipeline stage has a copy of the embedding that only its MTP heads use."""
    computes_logits = has_heads_on_last_stage(run) and not run.untie_embeddings_and_output_weights
    return bool(run.mtp_num_layers and pipeline_parallel(run) > 1 and not computes_logits)


DEFECTS = (
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
            and not run.use_distributed_optimizer  # which has a bucket for that weight alone
        ),
        when="--mtp-num-layers with --mtp-detach-heads, --pipeline-model-parallel-size > 1 and --overlap-grad-reduce, "
        "without --use-distributed-optimizer and --use-megatron-fsdp, where embeddings are untied or the heads are not "
        "on the last stage",
        only_if="the optimizer is not dist_muon, or Megatron is 0.19, or --no-use-layer-wise-param-layout is given",
        introduced_by=("NVIDIA/Megatron-LM#3456",),
        evidence="reproduced",
        instead="--use-distributed-optimizer",
        patch="detach-mtp-heads",
        unless=REFUSES_DEFERRED_GRADIENTS,
        second_reading="sources of 0.19.0 and main; predicate with tied embeddings and heads on the last stage; what "
        "the patch refuses; its program, also with the distributed and the layer-wise optimizer",
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
            and not run.use_megatron_fsdp
            and (run.decoupled_lr is not None or "muon" in str(run.optimizer))
        ),
        when="--mtp-num-layers with --pipeline-model-parallel-size > 1 and --decoupled-lr or --optimizer muon or "
        "dist_muon, without --use-megatron-fsdp",
        state="fixed in 0.18.0",
        evidence="reproduced",
        patch="tag-mtp-stage-embedding",
        diff=Diff(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            """
            if getattr(self, "mtp_process", False) and hasattr(self, "embedding"):
                self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
            """,
        ),
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
        affects=lambda run: (
            _has_unused_weight(run) and run.save and has_torch_dist_format(run) and not run.use_megatron_fsdp
        ),
        when="--mtp-num-layers with tied embeddings, --pipeline-model-parallel-size > 1 and --save in the format "
        "torch_dist, without --use-megatron-fsdp, where the heads are on the last stage, as by default",
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
