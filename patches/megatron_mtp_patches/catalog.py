"""The patches, in the order in which they apply: the table of contents."""

from . import (
    average_aux_loss_over_moe_layers,
    chunk_mtp_logits,
    clip_mtp_grads_separately,
    clip_named_groups_separately,
    count_experts_in_grad_norm,
    count_no_step_in_fully_shard_optimizer,
    derive_mtp_labels,
    detach_mtp_heads,
    drop_unused_output_weight,
    exempt_muon_from_clipping,
    floor_clip_coefficient,
    freeze_base_model_for_mtp,
    fsdp_without_master_weights,
    initialize_mtp_heads,
    keep_newton_schulz_scale_invariant,
    mtp_acceptance_length,
    mtp_acceptance_rate,
    recompute_quantized_mtp_heads,
    roll_padded_packed_sequences,
    scale_mtp_loss_separately,
    scatter_mtp_embeddings,
    skip_update_on_large_grad_norm,
    split_gated_qkv_for_muon,
    tag_mtp_stage_embedding,
    train_mtp_heads_for_acceptance,
)
from .engine import Patch, Wrap

CATALOG = (
    skip_update_on_large_grad_norm.PATCH,
    scale_mtp_loss_separately.PATCH,
    derive_mtp_labels.PATCH,
    roll_padded_packed_sequences.PATCH,
    scatter_mtp_embeddings.PATCH,
    recompute_quantized_mtp_heads.PATCH,
    mtp_acceptance_rate.PATCH,
    mtp_acceptance_length.PATCH,
    train_mtp_heads_for_acceptance.PATCH,
    chunk_mtp_logits.PATCH,
    detach_mtp_heads.PATCH,
    freeze_base_model_for_mtp.PATCH,
    initialize_mtp_heads.PATCH,
    clip_mtp_grads_separately.PATCH,
    tag_mtp_stage_embedding.PATCH,
    drop_unused_output_weight.PATCH,
    exempt_muon_from_clipping.PATCH,
    clip_named_groups_separately.PATCH,
    floor_clip_coefficient.PATCH,
    keep_newton_schulz_scale_invariant.PATCH,
    fsdp_without_master_weights.PATCH,
    count_experts_in_grad_norm.PATCH,
    average_aux_loss_over_moe_layers.PATCH,
    split_gated_qkv_for_muon.PATCH,
    count_no_step_in_fully_shard_optimizer.PATCH,
)
# Always applied, not selectable: the check that all ranks have the same patches, and the record of them in each run.
BASE = (
    Patch(
        id="record-of-the-patches",
        summary="All ranks apply the same patches, and the run says which",
        edits=(
            Wrap(
                "megatron.core.parallel_state:initialize_model_parallel",
                "megatron_mtp_patches.agreement:check_before_model_parallel",
                check_source=False,
            ),
            Wrap(
                "megatron.training.arguments:validate_args",
                "megatron_mtp_patches.provenance:record_in_arguments",
                check_source=False,
            ),
        ),
    ),
)
