"""Tied embeddings: what becomes of the gradients of the look-up and of the output layer, which share a weight."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    FUSES_UNDER_MEGATRON_FSDP,
    fuses_weight_gradients,
    has_heads_on_last_stage,
    has_megatron_fsdp,
    pipeline_parallel,
)
from ..defects.declare import Defect, Diff, Sign

_PATCH = "keep-gradients-of-tied-embeddings"
_INSTEAD = "--no-gradient-accumulation-fusion or --untie-embeddings-and-output-weights"


def _fuses_gradient_of_tied_weight(run: Any) -> bool:
    is_tied = run.untie_embeddings_and_output_weights is False
    return is_tied and fuses_weight_gradients(run) and not run.freeze_base_model_for_mtp


def _trains_copy_of_embedding_in_heads(run: Any) -> bool:
    """True if heads on the last of several stages train the copy of the embedding that computes the logits."""
    return pipeline_parallel(run) > 1 and has_heads_on_last_stage(run) and not run.mtp_detach_heads


DEFECTS = (
    Defect(
        id="fsdp-tied-embeddings",
        effect="Under Megatron-FSDP a tied embedding gets no gradient from the look-up, only that of the output layer",
        severity=5,
        signs=Sign(
            "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp:MegatronFSDP._register_fsdp_hooks",
            has="if param.grad_added_to_main_grad and param.grad is not None: del param.grad",
            lacks="zero_out_wgrad",
        ),
        affects=lambda run: (  # over several stages Megatron-FSDP does not start: fsdp-pipeline-stages
            has_megatron_fsdp(run) and pipeline_parallel(run) == 1 and _fuses_gradient_of_tied_weight(run)
        ),
        when="--use-megatron-fsdp with tied embeddings (no --untie-embeddings-and-output-weights), without pipeline "
        "parallelism, --no-gradient-accumulation-fusion and --freeze-base-model-for-mtp",
        only_if=FUSES_UNDER_MEGATRON_FSDP,
        evidence="reproduced",
        instead=_INSTEAD,
        patch=_PATCH,
        diff=Diff(
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel.__init__",
            """
            for layer in module.modules():  # an output layer without a weight has that of the embedding
                if getattr(layer, "gradient_accumulation_fusion", False) and layer.weight is None:
                    layer.gradient_accumulation_fusion = False
            """,
        ),
        second_reading="sources of 0.16.1 to main; the thread of #3822; its program; doctor with ties, fusion and "
        "pipeline stages just outside",
    ),
    Defect(
        id="mtp-tied-embeddings",
        effect="With tied embeddings the pipeline stage of the MTP heads loses the gradient of their look-up, so its "
        "copy of the embedding gets that of the output layer alone",
        severity=4,
        signs=Sign(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            has="if self.config.pipeline_model_parallel_size == 1: "
            "self.shared_embedding_or_output_weight().zero_out_wgrad = True",
            lacks="weight.zero_out_wgrad = True",
        ),
        affects=lambda run: (
            _trains_copy_of_embedding_in_heads(run)
            and _fuses_gradient_of_tied_weight(run)
            and not run.use_megatron_fsdp
            and (run.gtp_weight_remat_size or 1) == 1
            and not (run.defer_embedding_wgrad_compute and not run.wgrad_deferral_limit)
        ),
        when="--mtp-num-layers with tied embeddings (no --untie-embeddings-and-output-weights), "
        "--pipeline-model-parallel-size > 1 and the heads on the last stage, without --mtp-detach-heads, "
        "--freeze-base-model-for-mtp, --no-gradient-accumulation-fusion, --use-megatron-fsdp, "
        "--tensor-parallel-num-weight-shards, and "
        "--defer-embedding-wgrad-compute (unless --wgrad-deferral-limit > 0)",
        evidence="reproduced",
        instead=_INSTEAD,
        patch=_PATCH,
        diff=Diff(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer",
            """
            # The stage of the MTP heads looks tokens up in the weight that computes its logits.
            if self.share_embeddings_and_output_weights and getattr(self, "mtp_process", False):
                tied_weight = self.shared_embedding_or_output_weight()
                if not getattr(tied_weight, "is_gtp_weight_remat", False):
                    tied_weight.zero_out_wgrad = True
            """,
        ),
        second_reading="embeddings, output layers and hooks of 0.16.1 to main; its program on 0.16.1 to 0.19.2; doctor "
        "with untied embeddings, one stage and deferred gradients",
    ),
)
