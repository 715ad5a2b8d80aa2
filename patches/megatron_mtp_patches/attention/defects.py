"""Attention: latents (MLA), GatedDeltaNet, attention sinks, documents."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    context_parallel,
    copies_the_sequence,
    has_gated_delta_net,
    has_latent_attention,
    has_middle_stages,
    has_sparse_attention,
    is_hybrid,
    is_vlm,
    layers_of_hybrid,
    tensor_parallel,
)
from ..defects.declare import Defect, Sign

_MLA = "megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors"


def _fuses_latents(run: Any) -> bool:
    """True if one layer makes the latents of queries, keys and values; those of sparse attention stay two layers."""
    is_dense = "+" in layers_of_hybrid(run) if is_hybrid(run) else not has_sparse_attention(run)
    return bool(run.mla_down_proj_fusion and is_dense)


def _splits_latents(run: Any) -> bool:
    """True if the heads of MLA are split over ranks, and the down projection of their latents is as well."""
    is_refused = has_sparse_attention(run) and not run.sequence_parallel
    is_split = tensor_parallel(run) > 1 and (run.sequence_parallel or copies_the_sequence(run)) and not is_refused
    return bool(has_latent_attention(run) and is_split and _fuses_latents(run))


def _duplicates_latents(run: Any) -> bool:
    """True if the heads of MLA are split over ranks that have the whole sequence and a copy of the down projection."""
    is_before_0_19 = run.gtp_weight_remat_size is None  # it has no such setting
    is_refused = has_sparse_attention(run) and not is_before_0_19
    is_copied = copies_the_sequence(run) and not _fuses_latents(run)
    return bool(has_latent_attention(run) and is_copied and not (is_refused or run.is_of_ms_swift))


def _fuses_softmax(run: Any) -> bool:
    """True if the softmax of Megatron's own attention is a kernel that masks by position; unknown sizes count as its.

    The kernel takes the heads of a microbatch by fours.
    """
    heads = (run.micro_batch_size or 4) * (run.num_attention_heads or 4) // tensor_parallel(run)
    fits = run.seq_length is None or (16 < run.seq_length <= 4096 and run.seq_length % 4 == 0)
    is_plain = run.softmax_type in (None, "vanilla") and run.masked_softmax_fusion is not False
    return bool((run.bf16 or run.fp16) and is_plain and fits and heads % 4 == 0)


def _reads_mask(run: Any) -> bool:
    """True if attention reads the mask that a batch has."""
    backend = getattr(run.attention_backend, "name", run.attention_backend)
    if "local" in (run.transformer_impl, backend):
        return not (run.window_size or _fuses_softmax(run))
    return backend == "unfused" or not (run.bf16 or run.fp16)


def _attends_over_documents(run: Any) -> bool:
    """True if the mask of documents is not made, not sent to a stage, or goes to kernels that read none."""
    is_made = run.create_attention_mask_in_dataloader is not False and not has_middle_stages(run)
    has_documents = run.sft or run.dataloader_inter_document_masking  # their ends, which TransformerEngine reads
    return bool(run.reset_attention_mask and not has_documents and not (is_made and _reads_mask(run)))


def _splits_sinks(run: Any) -> bool:
    """True if context-parallel ranks share out learnable sinks by an all-to-all of TransformerEngine."""
    kinds = run.cp_comm_type if isinstance(run.cp_comm_type, (list, tuple)) else [run.cp_comm_type]
    is_parallel = context_parallel(run) > 1 and set(kinds) == {"a2a"}  # it refuses sinks in layers of another kind
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
        when="--multi-latent-attention with --tensor-model-parallel-size > 1, without --sequence-parallel, without "
        "--num-experts and --transformer-impl local (such runs end in an error): in a GPT or + layers of a hybrid "
        "model without sparse attention and --mla-down-proj-fusion, and before 0.19 with sparse attention (dsa, or D "
        "layers of a hybrid model); but not in ms-swift, whose own MLA ends in an error there",
        instead="--sequence-parallel",
        state="open",
        evidence="reproduced",
        patch="sum-gradients-of-shared-latents",
        seen_by="copies",
        second_reading="the layers and layer specs of MLA of 0.16.1, 0.18.2, 0.19.0 and main, with sparse attention as "
        "well, and the MLA of mcore-bridge 1.6.5; what --transformer-impl local makes of them (an error); what layers "
        "of experts and sparse attention refuse; its program; cases of its predicate; the thread of #6839; the "
        "wrappers of its patch",
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
        when="--multi-latent-attention with --mla-down-proj-fusion and --tensor-model-parallel-size > 1 (before 0.19 "
        "such a run ends in an error, ML-5383), with --sequence-parallel or without --num-experts, without "
        "--transformer-impl local, in a GPT without sparse attention or + layers of a hybrid model; and layer specs of "
        "your own with a column-parallel linear_kv_down_proj",
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
        effect="Tokens attend to earlier documents of their sequence: the flash and fused attention of "
        "TransformerEngine and the fused softmax of Megatron do not read the mask that --reset-attention-mask makes, "
        "middle pipeline stages do not get it, and --no-create-attention-mask-in-dataloader makes none",
        severity=4,
        signs=Sign(
            "megatron.core.extensions.transformer_engine:TEDotProductAttention.forward",
            has="super().forward(query, key, value, attention_mask,",
            lacks="AttnMaskType.arbitrary",
        ),
        affects=_attends_over_documents,
        when="--reset-attention-mask without --sft and --dataloader-inter-document-masking: with "
        "--no-create-attention-mask-in-dataloader, with more than two pipeline stages (--pipeline-model-parallel-size "
        "> 2, or virtual stages), or in bf16 or fp16 without --attention-backend unfused; with --transformer-impl "
        "local instead of that with --window-size, or in bf16 or fp16 with --softmax-type vanilla (the default), "
        "without --no-masked-softmax-fusion, with a --seq-length from 20 to 4096 and a number of heads on a rank "
        "(--num-attention-heads times --micro-batch-size) that are multiples of 4",
        only_if="--transformer-impl is not local, or the CUDA extension of its fused softmax is installed, without "
        "which the first step ends in an error",
        instead="train with --transformer-impl transformer_engine and without context parallelism: from 0.19 on, in "
        "bf16 or fp16, with --dataloader-inter-document-masking; else with --attention-backend unfused and at most two "
        "pipeline stages, without --no-create-attention-mask-in-dataloader",
        state="open",
        evidence="reproduced",
        second_reading="attention layers of 0.16.1, 0.19.0 and main, and what the softmax of Megatron's own fuses; "
        "which pipeline stages get a mask in 0.16.1, 0.18.2 and main; the masks of unfused attention in "
        "TransformerEngine 2.12, 2.16 and 2.17; validate_args and data sets of 0.19.0; its "
        "program on 0.18.2; doctor of 0.17.1 and 0.19.2 under its flags and just outside",
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
        affects=lambda run: has_gated_delta_net(run) and copies_the_sequence(run),
        when="GatedDeltaNet layers with --tensor-model-parallel-size > 1, without --sequence-parallel, and without "
        "--num-experts, with which such a run ends in an error",
        instead="--sequence-parallel",
        state="open",
        evidence="reproduced",
        patch="sum-gradients-of-output-norms",
        seen_by="copies",
        second_reading="the reduction and the layers of 0.16.1, 0.19.0 and main; what sequence parallelism makes of "
        "the norm; what layers of experts refuse; its program on 0.18.2; doctor under its flags and just outside; the "
        "wrapper of its patch",
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
        affects=lambda run: run.softmax_type == "learnable" and tensor_parallel(run) > 1 and run.clip_grad != 0,
        when="--softmax-type learnable with --tensor-model-parallel-size > 1 and --clip-grad above 0, as by default",
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
        effect="The first layer of attention ends in a RuntimeError, because each rank has the output gates of all "
        "heads of its query group",
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
)
