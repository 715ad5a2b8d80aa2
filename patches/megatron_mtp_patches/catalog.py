"""The patches, in the order in which they apply: the table of contents."""

from .attention import (
    count_attention_sinks,
    pass_rope_scaling_factor,
    scale_sparse_indexer_loss,
    sum_gradients_of_output_norms,
)
from .engine import AddField, Patch, Wrap
from .frameworks import (
    add_settings_to_ms_swift,
    initialize_mtp_heads_in_megatron_bridge,
    log_metrics_in_megatron_bridge,
    name_heads_left_out_in_megatron_bridge,
    pass_loss_mask_in_megatron_bridge,
    refuse_uninitialized_heads_in_megatron_bridge,
    schedule_mtp_loss_weight_in_megatron_bridge,
    schedule_mtp_loss_weight_in_verl,
    skip_updates_in_verl,
    train_heads_in_mcore_bridge,
)
from .fsdp import (
    add_fsdp_gradients_of_all_microbatches,
    add_fsdp_gradients_of_single_replicas,
    count_fsdp_replicas_once,
    count_no_step_in_fully_shard_optimizer,
    fsdp_without_master_weights,
    reduce_fsdp_gradients_of_replicas,
    replace_fsdp_gradients_by_their_mean,
    sum_fsdp_gradients_in_fp32,
)
from .moe import (
    average_aux_loss_over_moe_layers,
    count_experts_in_grad_norm,
    count_moe_tokens_once,
    count_tokens_of_all_microbatches,
    leave_heads_out_of_router_replay,
    pass_padding_mask_to_scheduled_layers,
    score_experts_in_fp32,
    sum_global_aux_loss_over_replicas,
    weight_moe_losses_by_token,
)
from .mtp import (
    chunk_mtp_logits,
    count_mtp_tokens_over_ranks,
    derive_mtp_labels,
    detach_mtp_heads,
    disable_mtp_loss,
    drop_unused_output_weight,
    freeze_base_model_for_mtp,
    initialize_mtp_heads,
    mtp_acceptance_length,
    mtp_acceptance_rate,
    recompute_quantized_mtp_heads,
    report_nonfinite_mtp_heads,
    roll_padded_packed_sequences,
    scale_mtp_loss_separately,
    scatter_mtp_embeddings,
    schedule_mtp_loss_weight,
    sum_gradients_of_repeated_weights,
    tag_mtp_stage_embedding,
    train_mtp_heads_at_own_rate,
    train_mtp_heads_for_acceptance,
)
from .muon import (
    clip_qk_of_all_layers,
    exempt_muon_from_clipping,
    keep_newton_schulz_scale_invariant,
    split_fused_weights_for_muon,
    split_gated_qkv_for_muon,
)
from .norms import (
    clip_mtp_grads_separately,
    clip_named_groups_separately,
    count_uninitialized_shards,
    floor_clip_coefficient,
    skip_update_on_large_grad_norm,
)
from .parallelism import (
    count_loss_tokens_over_cp,
    keep_outputs_until_sent,
    order_param_groups_alike,
    reduce_tensors_with_gaps,
)
from .quantization import (
    quantize_weights_of_each_step,
)
from .resume import (
    keep_learning_rates_at_resume,
    refresh_offloaded_params,
    save_own_state_of_each_param,
)
from .settings import OPTIMIZER_CONFIG, Setting
from .trainer import (
    freeze_all_layers,
)

_PATCHES = (
    skip_update_on_large_grad_norm.PATCH,
    scale_mtp_loss_separately.PATCH,
    derive_mtp_labels.PATCH,
    roll_padded_packed_sequences.PATCH,
    count_mtp_tokens_over_ranks.PATCH,
    scatter_mtp_embeddings.PATCH,
    recompute_quantized_mtp_heads.PATCH,
    sum_gradients_of_repeated_weights.PATCH,
    mtp_acceptance_rate.PATCH,
    mtp_acceptance_length.PATCH,
    train_mtp_heads_for_acceptance.PATCH,
    chunk_mtp_logits.PATCH,
    schedule_mtp_loss_weight.PATCH,
    detach_mtp_heads.PATCH,
    freeze_base_model_for_mtp.PATCH,
    disable_mtp_loss.PATCH,
    initialize_mtp_heads.PATCH,
    report_nonfinite_mtp_heads.PATCH,
    clip_mtp_grads_separately.PATCH,
    tag_mtp_stage_embedding.PATCH,
    drop_unused_output_weight.PATCH,
    exempt_muon_from_clipping.PATCH,
    clip_named_groups_separately.PATCH,
    floor_clip_coefficient.PATCH,
    keep_newton_schulz_scale_invariant.PATCH,
    fsdp_without_master_weights.PATCH,
    count_experts_in_grad_norm.PATCH,
    count_fsdp_replicas_once.PATCH,
    sum_fsdp_gradients_in_fp32.PATCH,
    reduce_fsdp_gradients_of_replicas.PATCH,
    add_fsdp_gradients_of_single_replicas.PATCH,
    add_fsdp_gradients_of_all_microbatches.PATCH,
    replace_fsdp_gradients_by_their_mean.PATCH,
    average_aux_loss_over_moe_layers.PATCH,
    split_gated_qkv_for_muon.PATCH,
    clip_qk_of_all_layers.PATCH,
    split_fused_weights_for_muon.PATCH,
    count_no_step_in_fully_shard_optimizer.PATCH,
    count_uninitialized_shards.PATCH,
    count_attention_sinks.PATCH,
    scale_sparse_indexer_loss.PATCH,
    sum_gradients_of_output_norms.PATCH,
    pass_rope_scaling_factor.PATCH,
    reduce_tensors_with_gaps.PATCH,
    count_loss_tokens_over_cp.PATCH,
    keep_outputs_until_sent.PATCH,
    order_param_groups_alike.PATCH,
    train_mtp_heads_at_own_rate.PATCH,  # it takes groups that all ranks have in one order
    keep_learning_rates_at_resume.PATCH,
    save_own_state_of_each_param.PATCH,
    refresh_offloaded_params.PATCH,
    weight_moe_losses_by_token.PATCH,
    count_moe_tokens_once.PATCH,
    count_tokens_of_all_microbatches.PATCH,
    sum_global_aux_loss_over_replicas.PATCH,
    pass_padding_mask_to_scheduled_layers.PATCH,
    score_experts_in_fp32.PATCH,
    leave_heads_out_of_router_replay.PATCH,
    quantize_weights_of_each_step.PATCH,
    freeze_all_layers.PATCH,
    log_metrics_in_megatron_bridge.PATCH,
    pass_loss_mask_in_megatron_bridge.PATCH,
    refuse_uninitialized_heads_in_megatron_bridge.PATCH,
    initialize_mtp_heads_in_megatron_bridge.PATCH,
    name_heads_left_out_in_megatron_bridge.PATCH,
    schedule_mtp_loss_weight_in_megatron_bridge.PATCH,
    skip_updates_in_verl.PATCH,
    schedule_mtp_loss_weight_in_verl.PATCH,
    train_heads_in_mcore_bridge.PATCH,
)
_FIELDS = [edit for patch in _PATCHES for edit in patch.edits if isinstance(edit, AddField)]
_SETTINGS = {edit: edit.setting for edit in _FIELDS if isinstance(edit.setting, Setting)}
SETTINGS_OF_OPTIMIZER = tuple(setting for edit, setting in _SETTINGS.items() if edit.target == OPTIMIZER_CONFIG)
CATALOG = (
    *_PATCHES,
    add_settings_to_ms_swift.declare(
        [edit for edit, setting in _SETTINGS.items() if setting in SETTINGS_OF_OPTIMIZER or setting.in_ms_swift]
    ),
)

# Always applied, not selectable: the check that all ranks have the same patches, their record in each run, the line
# that counts the known defects of Megatron that affect it, and how it differs from the run that saved its checkpoint.
BASE = (
    Patch(
        id="record-of-the-patches",
        summary="All ranks apply the same patches, and the run says which, and which defects are left",
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
            Wrap(
                "megatron.training.arguments:validate_args",
                "megatron_mtp_patches.defects.start_line:log_known_defects",
                check_source=False,
            ),
            Wrap(
                "megatron.training.checkpointing:check_checkpoint_args",
                "megatron_mtp_patches.resumed_run:warn_of_differences",
                check_source=False,
            ),
        ),
    ),
)
