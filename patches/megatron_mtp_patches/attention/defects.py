"""Attention: latents (MLA), sparse attention (DSA), GatedDeltaNet, attention sinks, documents."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    context_parallel,
    has_gated_delta_net,
    is_hybrid,
    is_vlm,
    layers_of_hybrid,
    microbatches,
    tensor_parallel,
)
from ..defects.declare import Defect, Sign

_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
_DSA = "megatron.core.transformer.experimental_attention_variant.dsa"
_MLA = "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors"
# 0.16 and 0.17 have the layers of sparse attention, and no model with them: building one ends in a ValueError.
_BUILDS_NO_SPARSE_ATTENTION = Sign(f"{_SPECS}:get_experimental_attention_variant_module_spec", lacks="'dsa'")


def _has_sparse_attention(run: Any) -> bool:
    return bool(run.experimental_attention_variant == "dsa" or "D" in layers_of_hybrid(run))


def _scales_indexer_loss(run: Any) -> bool:
    """True if the loss of the indexer should be scaled, as the main loss is."""
    is_mean = not run.calculate_per_token_loss and microbatches(run) > 1
    return bool(_has_sparse_attention(run) and run.dsa_indexer_loss_coeff and (is_mean or run.fp16))


def _splits_latents(run: Any) -> bool:
    """True if the heads of MLA are split over ranks, and the down projection of their latents is as well."""
    return bool(run.multi_latent_attention and tensor_parallel(run) > 1 and run.mla_down_proj_fusion)


def _duplicates_latents(run: Any) -> bool:
    """True if the heads of MLA are split over ranks that have the whole sequence and a copy of the down projection."""
    is_split = run.multi_latent_attention and tensor_parallel(run) > 1
    return bool(is_split and not run.mla_down_proj_fusion and not run.sequence_parallel)


def _attends_over_documents(run: Any) -> bool:
    """True if the mask of documents is not made, or goes to kernels of TransformerEngine that read none."""
    is_made = run.create_attention_mask_in_dataloader is not False
    backend = getattr(run.attention_backend, "name", run.attention_backend)
    is_read = run.transformer_impl == "local" or backend in ("unfused", "local") or not (run.bf16 or run.fp16)
    has_documents = run.sft or run.dataloader_inter_document_masking  # their ends, which all kernels read
    return bool(run.reset_attention_mask and not has_documents and not (is_made and is_read))


def _splits_sinks(run: Any) -> bool:
    """True if context-parallel ranks share out learnable sinks by an all-to-all of TransformerEngine."""
    kinds = run.cp_comm_type if isinstance(run.cp_comm_type, (list, tuple)) else [run.cp_comm_type]
    is_parallel = context_parallel(run) > 1 and "a2a" in kinds
    return bool(run.softmax_type == "learnable" and is_parallel and run.transformer_engine >= (2, 8))


DEFECTS = (
    Defect(
        id="ML-6839",
        effect="The positional key of MLA, and through it the down projection, the norm before it and all earlier "
        "layers, learn from the heads of one tensor-parallel rank, so the copies of these weights drift apart",
        severity=5,
        signs=Sign(
            _MLA,
            has="k_pos_emb = gather_from_sequence_parallel_region(k_pos_emb, group=self.tp_group)",
            lacks="copy_to_tensor_model_parallel_region",
        ),
        affects=_duplicates_latents,
        when="--multi-latent-attention with --tensor-model-parallel-size > 1, without --sequence-parallel and "
        "--mla-down-proj-fusion",
        instead="--sequence-parallel",
        state="open",
        evidence="reproduced",
        patch="sum-gradients-of-shared-latents",
        seen_by="copies",
        second_reading="the layers and layer specs of MLA of 0.16.1, 0.18.2, 0.19.0 and main, and what "
        "--transformer-impl local makes of them (an error); its program; doctor under its flags and just outside; the "
        "thread of #6839; the wrappers of its patch",
    ),
    Defect(
        id="ML-1699",
        effect="The part of a split down projection that makes the positional key of MLA learns from the heads of one "
        "tensor-parallel rank, and with it the norm before it and all earlier layers",
        severity=4,
        signs=Sign(
            _MLA,
            has="kv_combined = gather_from_tensor_model_parallel_region(kv_combined)",
            lacks="copy_to_tensor_model_parallel_region",
        ),
        affects=_splits_latents,
        when="--mla-down-proj-fusion with --tensor-model-parallel-size > 1, with and without sequence parallelism "
        "(before 0.19 such a run ends in an error), and layer specs of your own with a column-parallel "
        "linear_kv_down_proj",
        instead="leave out --mla-down-proj-fusion and set --sequence-parallel",
        state="open",
        evidence="reproduced",
        patch="sum-gradients-of-shared-latents",
        second_reading="the layers and layer specs of MLA of 0.16.1, 0.17.1, 0.18.2, 0.19.0 and main, fused ones as "
        "well; its program; doctor of 0.17.1 and 0.19.2 under its flags and just outside; the thread of #1699; the "
        "wrappers of its patch",
    ),
    Defect(
        id="sinks-with-cp",
        effect="The gradient of learnable attention sinks is as many times too large as there are context-parallel "
        "ranks: TransformerEngine gives each rank the whole, and Megatron adds the gradients of all ranks up",
        severity=3,
        signs=Sign(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__",
            has=('extra_kwargs["softmax_type"] = self.config.softmax_type', 'extra_kwargs["cp_comm_type"]'),
        ),
        affects=_splits_sinks,
        when="--softmax-type learnable with --context-parallel-size > 1 and --cp-comm-type a2a, on TransformerEngine "
        "2.8 or newer",
        evidence="reproduced",
        patch="count-sink-gradients-once",
        second_reading="attention layers of 0.16.1 to main; its program on 0.18.2; doctor of 0.17.1 and 0.19.2 under "
        "its flags and just outside; the wrapper of its patch",
    ),
    Defect(
        id="ML-2357",
        effect="Tokens attend to earlier documents of their sequence, because --reset-attention-mask makes a mask that "
        "the flash and fused attention of TransformerEngine do not read",
        severity=4,
        signs=Sign(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
            has="super().forward(query, key, value, attention_mask,",
            lacks="AttnMaskType.arbitrary",
        ),
        affects=_attends_over_documents,
        when="--reset-attention-mask without --dataloader-inter-document-masking, in bf16 or fp16 without "
        "--attention-backend unfused and --transformer-impl local, or with --no-create-attention-mask-in-dataloader",
        instead="set --attention-backend unfused, which excludes context parallelism, or from 0.19 on "
        "--dataloader-inter-document-masking",
        state="open",
        evidence="reproduced",
        second_reading="attention layers of 0.16.1, 0.19.0 and main; the masks of unfused attention in "
        "TransformerEngine 2.12, 2.16 and 2.17; validate_args and data sets of 0.19.0; its program on 0.18.2; doctor "
        "of 0.17.1 and 0.19.2 under its flags and just outside",
    ),
    Defect(
        id="ML-4070",
        effect="The loss of the sparse attention's indexer is not divided by the number of microbatches, nor "
        "multiplied by the loss scale of FP16, so its gradients are as many times too large as a step has "
        "microbatches, and with --fp16 too small by the loss scale",
        severity=4,
        signs=Sign(
            "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
            lacks=("experimental_attention_variant", "DSAIndexerLossAutoScaler"),
        ),
        fixed_by=_BUILDS_NO_SPARSE_ATTENTION,
        affects=_scales_indexer_loss,
        when="--experimental-attention-variant dsa, or D layers of a hybrid model, with --dsa-indexer-loss-coeff, and "
        "with --fp16 or with several microbatches and no --calculate-per-token-loss",
        more_links=("NVIDIA/Megatron-LM#5244",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="scale-sparse-indexer-loss",
        second_reading="schedules of 0.18.2 and 0.19.0; the specs of 0.16.1 and 0.17.1, which build no sparse "
        "attention; what gives a hybrid model the setting; its program; doctor under its flags and just outside; the "
        "wrapper of its patch",
    ),
    Defect(
        id="ML-3026a",
        effect="The sparse attention's indexer gets the latent query before its normalization, unlike DeepSeek's",
        severity=3,
        signs=Sign(f"{_SPECS}:get_dsa_module_spec_for_backend", has="q_layernorm=IdentityOp"),
        fixed_by=_BUILDS_NO_SPARSE_ATTENTION,
        affects=lambda run: (  # a hybrid model has no such normalization
            run.experimental_attention_variant == "dsa" and run.qk_layernorm and not is_hybrid(run)
        ),
        when="--experimental-attention-variant dsa with --qk-layernorm in a GPT",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="the layer specs of 0.16.1 to 0.19.0 and of hybrid models; the commit of #3026; its program on "
        "0.18.2; doctor under its flags",
    ),
    Defect(
        id="ML-3026b",
        effect="The sparse attention's indexer interleaves its rotary embeddings, unlike DeepSeek's, so it selects "
        "other tokens than those that the weights were trained for",
        severity=3,
        signs=Sign(
            "megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb",
            has="multi_latent_attention=config.multi_latent_attention",
            lacks="mla_rotary_interleaved",
        ),
        fixed_by=_BUILDS_NO_SPARSE_ATTENTION,
        affects=lambda run: _has_sparse_attention(run) and (run.load or run.pretrained_checkpoint),
        when="--experimental-attention-variant dsa, or D layers of a hybrid model, with --load or "
        "--pretrained-checkpoint",
        only_if="the weights come from another implementation, as DeepSeek's do",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="the rotary embeddings of 0.18.2 and 0.19.0; the specs of 0.16.1 and 0.17.1, which build no "
        "sparse attention; its program on 0.18.2",
    ),
    Defect(
        id="ML-4395",
        effect="The vision encoder uses a causal mask: each image patch attends only to earlier ones, so a pretrained "
        "encoder gives wrong features",
        severity=3,
        signs=Sign(
            "megatron.core.models.vision.vit_layer_specs:get_vit_layer_with_local_spec", has="AttnMaskType.causal"
        ),
        affects=lambda run: run.transformer_impl == "local" and is_vlm(run),
        when="pretrain_vlm.py with --transformer-impl local",
        only_if="the script is pretrain_vlm.py, and not another one with its flags",
        instead="--transformer-impl transformer_engine",
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="the layer specs and pretrain_vlm.py of 0.16.1, 0.17.1 and 0.18.2: what the vision encoder is "
        "built of and which mask it gets; the commit of #4395",
    ),
    Defect(
        id="ML-7452k",
        effect="Each tensor-parallel rank updates the output norm of GatedDeltaNet with the gradient of its own heads "
        "only, so the copies of its weight drift apart",
        severity=3,
        signs=Sign(
            "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
            has='"q_layernorm" in name',
            lacks="out_norm",
        ),
        affects=lambda run: has_gated_delta_net(run) and tensor_parallel(run) > 1 and not run.sequence_parallel,
        when="GatedDeltaNet layers with --tensor-model-parallel-size > 1, without --sequence-parallel",
        instead="--sequence-parallel",
        state="open",
        evidence="reproduced",
        patch="sum-gradients-of-output-norms",
        seen_by="copies",
        second_reading="the reduction and the layers of 0.16.1, 0.19.0 and main; what sequence parallelism makes of "
        "the norm; its program on 0.18.2; doctor under its flags and just outside; the wrapper of its patch",
    ),
    Defect(
        id="ML-7530",
        effect="The gradient norm counts the learnable attention sinks of the first tensor-parallel rank only, so "
        "gradients are clipped slightly too little",
        severity=2,
        signs=Sign(
            "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            has="softmax_offset",
            lacks=("set_tensor_model_parallel_attributes", "tensor_model_parallel"),
        ),
        affects=lambda run: run.softmax_type == "learnable" and tensor_parallel(run) > 1,
        when="--softmax-type learnable with --tensor-model-parallel-size > 1",
        more_links=("NVIDIA/Megatron-LM#7452",),
        state="open",
        evidence="reproduced",
        patch="count-attention-sinks",
        seen_by="norm",
        second_reading="attention layers of 0.16.1 and main and of TransformerEngine 2.16; its program on 0.18.2; "
        "doctor under its flags and just outside",
    ),
    Defect(
        id="ML-3575",
        effect="The first layer ends in a RuntimeError, because each rank has the output gates of all heads of its "
        "query group",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
            has="if output_gate:",
            lacks="gate = gate[:, :, idx * size : (idx + 1) * size, :]",
        ),
        affects=lambda run: (
            run.attention_output_gate
            and run.group_query_attention is not False
            and 0 < (run.num_query_groups or 0) < tensor_parallel(run)
        ),
        when="--attention-output-gate with --num-query-groups less than --tensor-model-parallel-size",
        instead="choose a --tensor-model-parallel-size up to --num-query-groups",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="the source of 0.16.1; the commit of #3575; its program on 0.16.1; doctor under its flags",
    ),
    Defect(
        id="indexer-loss-per-token",
        effect="The loss of the sparse attention's indexer is a mean over tokens, which is divided by the number of "
        "tokens of the step once more, so the indexer hardly learns from it",
        severity=3,
        signs=Sign(f"{_DSA}:compute_dsa_indexer_loss", has="indexer_loss = kl_div * loss_coeff", lacks="per_token"),
        fixed_by=_BUILDS_NO_SPARSE_ATTENTION,
        affects=lambda run: _has_sparse_attention(run) and run.dsa_indexer_loss_coeff and run.calculate_per_token_loss,
        when="--experimental-attention-variant dsa, or D layers of a hybrid model, with --dsa-indexer-loss-coeff and "
        "--calculate-per-token-loss",
        instead="leave out --calculate-per-token-loss",
        state="fixed in 0.19.0",
        evidence="read",
    ),
)
