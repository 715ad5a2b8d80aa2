"""The patches, in the order in which they apply: the table of contents.

Where several change one function (`megatron-mtp-patches explain FUNCTION` names them), a later one is around an earlier
one. Settings are checked, and flags listed, in this order as well.
"""

from __future__ import annotations

from importlib import import_module

from .declarations.settings import OPTIMIZER_CONFIG, Setting
from .engine import AddField, Patch, Wrap
from .frameworks import add_settings_to_ms_swift

# The module of each declaration, in the package of its topic.
_MODULES = (
    "norms.skip_update_on_large_grad_norm",
    "mtp.scale_mtp_loss_separately",
    "mtp.derive_mtp_labels",
    "mtp.roll_padded_packed_sequences",
    "mtp.count_mtp_tokens_over_ranks",
    "mtp.scatter_mtp_embeddings",
    "mtp.recompute_quantized_mtp_heads",
    "mtp.sum_gradients_of_repeated_weights",
    "mtp.mtp_acceptance_rate",
    "mtp.mtp_acceptance_length",
    "mtp.train_mtp_heads_for_acceptance",
    "mtp.chunk_mtp_logits",
    "mtp.schedule_mtp_loss_weight",
    "mtp.detach_mtp_heads",
    "mtp.freeze_base_model_for_mtp",
    "mtp.disable_mtp_loss",
    "mtp.initialize_mtp_heads",
    "mtp.report_nonfinite_mtp_heads",
    "norms.clip_mtp_grads_separately",
    "mtp.tag_mtp_stage_embedding",
    "mtp.drop_unused_output_weight",
    "muon.exempt_muon_from_clipping",
    "norms.clip_named_groups_separately",
    "norms.floor_clip_coefficient",
    "muon.keep_newton_schulz_scale_invariant",
    "fsdp.fsdp_without_master_weights",
    "moe.count_experts_in_grad_norm",
    "fsdp.count_fsdp_replicas_once",
    "fsdp.sum_fsdp_gradients_in_fp32",
    "fsdp.reduce_fsdp_gradients_of_replicas",
    "fsdp.add_fsdp_gradients_of_single_replicas",
    "fsdp.add_fsdp_gradients_of_all_microbatches",
    "fsdp.replace_fsdp_gradients_by_their_mean",
    "moe.average_aux_loss_over_moe_layers",
    "muon.split_gated_qkv_for_muon",
    "muon.clip_qk_of_all_layers",
    "muon.split_fused_weights_for_muon",
    "fsdp.count_no_step_in_fully_shard_optimizer",
    "norms.count_uninitialized_shards",
    "norms.count_duplicated_weights_once",
    "norms.read_gradients_in_their_dtype",
    "attention.count_attention_sinks",
    "attention.count_sink_gradients_once",
    "attention.scale_sparse_indexer_loss",
    "attention.sum_gradients_of_output_norms",
    "attention.sum_gradients_of_shared_latents",
    "attention.pass_rope_scaling_factor",
    "parallelism.reduce_tensors_with_gaps",
    "data.count_loss_tokens_over_cp",
    "data.mask_prompts_of_identity_format",
    "parallelism.keep_outputs_until_sent",
    "parallelism.keep_gradients_of_tied_embeddings",
    "parallelism.order_param_groups_alike",
    "mtp.train_mtp_heads_at_own_rate",  # it takes groups that all ranks have in one order
    "resume.keep_learning_rates_at_resume",
    "resume.save_own_state_of_each_param",
    "resume.refresh_offloaded_params",
    "resume.read_tensor_metadata_of_newer_torch",
    "moe.weight_moe_losses_by_token",
    "moe.count_moe_tokens_once",
    "moe.count_tokens_of_all_microbatches",
    "moe.sum_global_aux_loss_over_replicas",
    "moe.pass_padding_mask_to_routers",
    "moe.score_experts_in_fp32",
    "moe.leave_heads_out_of_router_replay",
    "moe.make_router_gradients_contiguous",
    "quantization.quantize_weights_of_each_step",
    "trainer.freeze_all_layers",
    "trainer.log_first_step_once",
    "trainer.watch_invariants",
    "frameworks.log_metrics_in_megatron_bridge",
    "frameworks.pass_loss_mask_in_megatron_bridge",
    "frameworks.refuse_uninitialized_heads_in_megatron_bridge",
    "frameworks.initialize_mtp_heads_in_megatron_bridge",
    "frameworks.name_heads_left_out_in_megatron_bridge",
    "frameworks.schedule_mtp_loss_weight_in_megatron_bridge",
    "frameworks.skip_updates_in_verl",
    "frameworks.refuse_heads_that_verl_cannot_save",
    "frameworks.schedule_mtp_loss_weight_in_verl",
    "frameworks.train_heads_in_mcore_bridge",
)


def _declared_in(module: str) -> Patch:
    """Return the `PATCH` of a module of this package.

    Raises:
        ImportError: it has none.
    """
    name = f"{__package__}.{module}"
    patch = getattr(import_module(name), "PATCH", None)
    if not isinstance(patch, Patch):
        raise ImportError(
            f"{name} is listed in catalog.py and declares no patch: give it PATCH = Patch(...)", name=name
        )
    return patch


_PATCHES = tuple(map(_declared_in, _MODULES))
_FIELDS = [edit for patch in _PATCHES for edit in patch.edits if isinstance(edit, AddField)]
SETTINGS = {edit: edit.setting for edit in _FIELDS if isinstance(edit.setting, Setting)}
SETTINGS_OF_OPTIMIZER = tuple(setting for edit, setting in SETTINGS.items() if edit.target == OPTIMIZER_CONFIG)
CATALOG = (
    *_PATCHES,
    add_settings_to_ms_swift.declare(
        [edit for edit, setting in SETTINGS.items() if setting in SETTINGS_OF_OPTIMIZER or setting.in_ms_swift]
    ),
)

_CORE, _TRAINING = "megatron.core", "megatron.training"
_BRIDGE_CONFIG = "megatron.bridge.training.config"
_BRIDGE_OVERRIDES = "megatron.bridge.training.utils.omegaconf_utils"
_VERL_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngine"
# Always applied, not selectable: the check that all ranks have the same patches, their record in each run, the line
# that counts the known defects of Megatron that affect it, the check that each setting of a patch acts where it is set,
# and how the run differs from the one that saved its checkpoint.
BASE = (
    Patch(
        id="record-of-the-patches",
        summary="All ranks apply the same patches, and the run says which, and which defects are left",
        edits=(
            # Megatron-Bridge saves its configuration with each checkpoint.
            AddField(
                f"{_BRIDGE_CONFIG}:LoggerConfig",
                field="megatron_mtp_patches",
                type=str,
                default="",
                doc="The patches that this run has; set by them.",
                check_source=False,
            ),
            *(
                Wrap(target, f"megatron_mtp_patches.{override}", check_source=False)
                for target, override in (
                    (
                        f"{_CORE}.parallel_state:initialize_model_parallel",
                        "run_record.agreement:check_before_model_parallel",
                    ),
                    (f"{_TRAINING}.arguments:validate_args", "run_record.provenance:record_in_arguments"),
                    (f"{_TRAINING}.arguments:validate_args", "doctor.start_line:log_known_defects"),
                    (f"{_CORE}.optimizer:_get_param_groups", "run_record.refuse_idle_settings:check_configs"),
                    (
                        f"{_BRIDGE_CONFIG}:ConfigContainer.validate",
                        "run_record.provenance:record_in_bridge_configuration",
                    ),
                    (
                        f"{_BRIDGE_CONFIG}:ConfigContainer.validate",
                        "run_record.refuse_idle_settings:check_bridge_container",
                    ),
                    (
                        f"{_BRIDGE_OVERRIDES}:parse_hydra_overrides",
                        "run_record.refuse_idle_settings:check_bridge_overrides",
                    ),
                    (f"{_BRIDGE_OVERRIDES}:apply_overrides", "run_record.refuse_idle_settings:check_bridge_values"),
                    # The SFT trainer calls the one, the task runner of main_ppo the other.
                    ("verl.utils.device:auto_set_device", "run_record.refuse_idle_settings:check_verl_configuration"),
                    (
                        "verl.trainer.ppo.utils:need_critic",
                        "run_record.refuse_idle_settings:check_verl_configuration",
                    ),
                    (f"{_VERL_ENGINE}.__init__", "run_record.refuse_idle_settings:check_verl_engine"),
                    ("swift.utils.utils:parse_args", "run_record.refuse_idle_settings:check_swift_arguments"),
                    (f"{_TRAINING}.checkpointing:check_checkpoint_args", "run_record.provenance:warn_of_differences"),
                )
            ),
        ),
    ),
)
