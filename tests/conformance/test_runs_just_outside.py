"""Runs that a defect affects, and runs that differ from them by a setting and cannot meet it."""

from types import SimpleNamespace

import pytest
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.doctor.findings import RunSettings

pytestmark = pytest.mark.forked("python")

DOCUMENTS = {"reset_attention_mask": True, "bf16": True}
ROPE = {"use_rope_scaling": True, "rope_scaling_factor": 32, "position_embedding_type": "rope"}
AUX_LOSS = {"num_experts": 4, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
Z_LOSS = {"num_experts": 4, "moe_z_loss_coeff": 1e-3}
NO_LOSS = {"num_experts": 4, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
REPEATED = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
HYBRID_REPEATED = {**REPEATED, "hybrid_layer_pattern": "M*E/*E"}
HYBRID = {**HYBRID_REPEATED, "mtp_num_layers": 1, "mtp_use_repeated_layer": False}
SHARDED = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
SPLIT = {"num_experts": 4, "moe_grouped_gemm": True, "tensor_model_parallel_size": 2, "add_bias_linear": True}
WHOLE = {**SPLIT, "expert_tensor_parallel_size": 1}  # each tensor-parallel rank has a copy of each expert
DEALT_OUT = {**WHOLE, "expert_model_parallel_size": 2}
ONE_EXPERT_A_RANK = {
    "num_experts": 4,
    "expert_model_parallel_size": 4,
    "overlap_moe_expert_parallel_comm": True,
    "moe_token_dispatcher_type": "alltoall",
}
SPLIT_MASK = {
    **AUX_LOSS,
    "sequence_parallel": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}
SIGMOID = {"num_experts": 4, "moe_router_score_function": "sigmoid", "bf16": True}
HEADS = {"mtp_num_layers": 1}
RECOMPUTED = {**HEADS, "recompute_granularity": "full"}
CLIPPED = {"qk_clip": True, "bf16": True}
LOGGED = {"log_max_attention_logit": True, "tensorboard_dir": "x", "bf16": True}
FSDP = {"use_megatron_fsdp": True}
FSDP_TIED = {**FSDP, "untie_embeddings_and_output_weights": False}
PRECISION_AWARE = {"use_precision_aware_optimizer": True}
HALF_PRECISION_GRADIENTS = {**PRECISION_AWARE, "main_grads_dtype": "bf16"}
PACKED = {**HEADS, "packed_sequence_specs": SimpleNamespace(pad_seq_to_mult=4)}  # Megatron-Bridge's
UNPADDED = {"packed_sequence_specs": SimpleNamespace(pad_seq_to_mult=1)}
STAGES = {**HEADS, "pipeline_model_parallel_size": 2}
DETACHED = {
    **STAGES,
    "untie_embeddings_and_output_weights": True,
    "mtp_detach_heads": True,
    "overlap_grad_reduce": True,
}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
LAYER_WISE = {"log_params_norm": True, "optimizer": "dist_muon", "bf16": True, "data_parallel_size": 2}
PER_TOKEN_INDEXER = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_loss_coeff": 0.1,
    "calculate_per_token_loss": True,
}
RECOMPUTED_DEPTHS = {
    **REPEATED,
    **SHARDED,
    "data_parallel_size": 2,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
}
OF_MODELOPT = {"hybrid_layer_pattern": "M*", "norm_epsilon": 1e-6, "modelopt_enabled": True}
CLAMPED = {"swiglu": True, "activation_func_clamp_value": 7.0, "bias_swiglu_fusion": True}
UNFUSED = {**CLAMPED, "bias_swiglu_fusion": False}
SHARED = {"fp8_recipe": "mxfp8", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
LOADS_MAIN_PARAMS = {
    "load": "x",
    "no_load_optim": True,
    "load_main_params_from_ckpt": True,
    "use_distributed_optimizer": True,
    "bf16": True,
    "num_experts": 4,
    "expert_model_parallel_size": 2,
}
INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2}
DELTA_NET = {"experimental_attention_variant": "gated_delta_net"}
SAVED = {"save": "x", "dist_ckpt_optim_fully_reshardable": True, "use_distributed_optimizer": True}
SAVED_IN_BUCKETS = {**SAVED, "overlap_grad_reduce": True}
PACKED_OVER_TP = {"sft": True, "tensor_model_parallel_size": 2}
VLM = {"freeze_LM": True, **ROPE}
GRAPHS_OF_ROUTERS = {
    "hybrid_override_pattern": "M*E",
    "num_experts": 4,
    "cuda_graph_impl": "local",
    "cuda_graph_scope": ["moe_router"],
    "moe_token_dispatcher_type": "flex",
}
GLOBAL_AUX_LOSS = {**AUX_LOSS, "moe_router_load_balancing_type": "global_aux_loss"}
MANY_MICROBATCHES = {**GLOBAL_AUX_LOSS, "global_batch_size": 4, "micro_batch_size": 1}
OF_MEGATRONS_TRAINER = {"yaml_cfg": None}
HYBRID_CP = {**MANY_MICROBATCHES, **OF_MEGATRONS_TRAINER, "hybrid_context_parallel": True}
LAYERS_LAID_OUT = {
    "optimizer": "dist_muon",
    "use_distributed_optimizer": False,
    "use_layer_wise_param_layout": True,
}
SAVED_LAYER_WISE = {**OF_MEGATRONS_TRAINER, **LAYERS_LAID_OUT, "save": "x", "ckpt_format": "torch"}
LOADED_WITH_FSDP = {**OF_MEGATRONS_TRAINER, **FSDP, "load": "x"}
LOADED_REMAINDERS = {**PRECISION_AWARE, "load": "x", "bf16": True, "dist_ckpt_optim_fully_reshardable": True}


@pytest.mark.parametrize(
    "id, run, is_affected",
    [
        ("ML-2357", DOCUMENTS, True),
        ("ML-2357", {**DOCUMENTS, "dataloader_inter_document_masking": True}, False),
        ("ML-6306", ROPE, True),
        ("ML-6306", {**ROPE, "position_embedding_type": "yarn"}, False),
        ("ML-6306", {**ROPE, "multi_latent_attention": True}, False),
        ("ML-6748", {**REPEATED, **AUX_LOSS}, True),
        ("ML-6748", {**REPEATED, **Z_LOSS}, True),
        ("ML-6748", {**REPEATED, **NO_LOSS}, False),
        ("ML-6748b", {**HYBRID_REPEATED, **AUX_LOSS}, True),
        ("ML-6748b", {**HYBRID_REPEATED, **Z_LOSS}, False),
        ("ML-6748c", {**HYBRID, **AUX_LOSS}, True),
        ("ML-6748c", {**HYBRID, **Z_LOSS}, True),
        ("ML-6748c", {**HYBRID, **NO_LOSS}, False),
        ("ML-5222", {**SHARDED, "fsdp_double_buffer": True}, True),
        ("ML-5222", {**SHARDED, "nccl_ub": True}, False),  # refused without the double buffer
        ("ML-5222", {**SHARDED, "fsdp_double_buffer": False}, False),
        ("ML-1555", NO_LOSS, True),
        ("ML-1555", AUX_LOSS, False),
        ("ML-1555", {**NO_LOSS, "moe_router_load_balancing_type": "none"}, False),
        ("ML-5940", {**UNFUSED, "moe_shared_expert_intermediate_size": 64}, False),
        ("ML-5940", {**UNFUSED, "moe_shared_expert_overlap": True}, True),
        ("ML-5940", {**UNFUSED, "use_te_activation_func": True}, True),
        ("z-loss-of-repeated-layer", {**Z_LOSS, **REPEATED}, True),
        ("z-loss-of-repeated-layer", {**Z_LOSS, **REPEATED, "num_layers": 2, "moe_layer_freq": [1, 0]}, False),
        ("mtp-heads-without-padding-mask", {**AUX_LOSS, **HEADS, "num_layers": 2, "moe_layer_freq": [1, 0]}, False),
        ("hybrid-mtp-without-padding-mask", {**AUX_LOSS, **HEADS, "hybrid_layer_pattern": "M*E/M*"}, False),
        ("ML-5563", {**SPLIT_MASK, "overlap_moe_expert_parallel_comm": True}, False),
        ("ML-5563", SPLIT_MASK, True),
        ("ML-3164", ONE_EXPERT_A_RANK, True),
        ("ML-3164", {**ONE_EXPERT_A_RANK, "expert_tensor_parallel_size": 2}, False),
        ("ML-3673", SIGMOID, True),
        ("ML-3673", {**SIGMOID, "moe_router_load_balancing_type": "sinkhorn"}, False),
        ("ML-5916", DEALT_OUT, True),
        ("ML-5916", {**SPLIT, "expert_tensor_parallel_size": 2}, True),
        ("ML-5916", WHOLE, False),
        ("ML-5916", {**DEALT_OUT, "trains_adapters": True}, False),
        ("ML-5916b", DEALT_OUT, True),
        ("ML-5916b", WHOLE, False),
        ("ML-5916b", {**DEALT_OUT, "transformer_impl": "local"}, True),  # its row-parallel biases
        ("ML-5916b", {**DEALT_OUT, "bias_dropout_fusion": True}, False),  # refused
        ("ML-5916b", {**DEALT_OUT, "moe_grouped_gemm": False, "bias_dropout_fusion": True}, True),
        ("ML-6099", {**DEALT_OUT, "optimizer": "dist_muon", "bf16": True}, True),
        ("ML-6099", {**WHOLE, "optimizer": "dist_muon", "bf16": True, "data_parallel_size": 2}, True),
        ("ML-6099", {**WHOLE, "optimizer": "dist_muon", "bf16": True, "data_parallel_size": 1}, False),
        ("norm-of-unsharded-experts", {**WHOLE, "optimizer": "dist_muon", "data_parallel_size": 1}, True),
        ("norm-of-unsharded-experts", {**WHOLE, "optimizer": "dist_muon", "data_parallel_size": 2}, False),
        ("norm-of-unsharded-experts", {**DEALT_OUT, "optimizer": "dist_muon", "data_parallel_size": 1}, False),
        ("norm-of-unsharded-experts", {**WHOLE, "optimizer": "muon", "data_parallel_size": 1}, False),
        ("save-of-unsharded-experts", {**WHOLE, "optimizer": "dist_muon", "save": "x"}, True),
        ("save-of-unsharded-experts", {**WHOLE, "optimizer": "dist_muon", "save": "x", "no_save_optim": True}, False),
        ("save-of-unsharded-experts", {**WHOLE, "optimizer": "dist_muon", "save": "x", "ckpt_format": "torch"}, False),
    ],
)
def test_a_run_and_one_just_outside(find_affecting, id, run, is_affected):
    assert (id in find_affecting(run)) is is_affected


@pytest.mark.parametrize("version, is_old", [("2.9.0", True), ("2.10.0", False), (None, False)])
@pytest.mark.parametrize(
    "strategy, is_sharded", [("optim_grads_params", True), ("optim_grads", True), ("optim", False)]
)
def test_an_old_transformer_engine_adds_to_leftovers_of_sharded_gradients(
    find_affecting, strategy, is_sharded, version, is_old
):
    run = {"use_megatron_fsdp": True, "gradient_accumulation_fusion": True, "data_parallel_sharding_strategy": strategy}
    assert ("ML-2904" in find_affecting(run, te=version)) is (is_old and is_sharded)


@pytest.mark.parametrize(
    "id, affected, more",
    [
        ("fsdp-tied-embeddings", FSDP_TIED, {"pipeline_model_parallel_size": 2}),
        ("fsdp-output-weight", {**FSDP, **HEADS}, {"megatron_fsdp_version": 2}),
        ("fsdp-repeated-head", {**SHARDED, **REPEATED}, {"megatron_fsdp_version": 2}),
        ("fsdp-repeated-head", {**SHARDED, **REPEATED}, {"data_parallel_sharding_strategy": "no_shard"}),
        ("ML-4116", {"mtp_detach_heads": True, "optimizer": "dist_muon"}, {"clip_grad": 0.0}),
        ("ML-4116", {"mtp_detach_heads": True, "optimizer": "dist_muon"}, {"use_layer_wise_param_layout": False}),
        ("ML-4116b", {**FSDP, "mtp_detach_heads": True}, {"clip_grad": 0.0}),
        ("ML-4116b", {**FSDP, "mtp_detach_heads": True}, {"megatron_fsdp_version": 2}),
        ("ML-7338", HALF_PRECISION_GRADIENTS, FSDP),
        ("ML-7338", HALF_PRECISION_GRADIENTS, {"fp8_recipe": "mxfp8"}),
        ("ML-7338", {**PRECISION_AWARE, "grad_reduce_in_bf16": True}, {"grad_reduce_in_bf16": False}),
        ("ML-7338", {**PRECISION_AWARE, "fp16": True}, {"accumulate_allreduce_grads_in_fp32": True}),
        ("ML-7338", {**PRECISION_AWARE, "bf16": True, "grad_reduce_in_fp32": False}, {"grad_reduce_in_fp32": True}),
        ("qk-clip-validation", {**CLIPPED, "eval_interval": 10, "eval_iters": 1}, {"eval_interval": None}),
        ("qk-clip-validation", {**CLIPPED, "eval_interval": 10, "eval_iters": 1}, {"bf16": False}),
        ("qk-clip-heads", {**CLIPPED, **HEADS}, {"is_of_verl": True}),
        ("qk-clip-heads", {**CLIPPED, **HEADS, "hybrid_layer_pattern": "*-/M"}, {"hybrid_layer_pattern": "M*/*"}),
        ("qk-clip-negative-logits", CLIPPED, {"transformer_impl": "local"}),
        ("qk-clip-negative-logits", CLIPPED, {"attention_output_gate": True}),
        ("ML-4646", {**CLIPPED, "use_distributed_optimizer": True}, {"optimizer": "soap"}),
        ("ML-5067", LOGGED, {"is_of_megatron_bridge": True}),
        ("attention-logit-of-last-rank", {**LOGGED, "tensor_model_parallel_size": 2}, {"tensorboard_dir": None}),
        ("ML-3396", {**HEADS, "eod_mask_loss": True}, {"is_of_verl": True}),
        ("ML-3159", {**HEADS, "calculate_per_token_loss": True}, {"is_of_ms_swift": True}),
        ("ML-4593", {**RECOMPUTED, "fp8": "hybrid"}, {"is_of_verl": True}),
        ("ML-4593b", RECOMPUTED, {"is_of_ms_swift": True}),
        ("ML-5034", {**STAGES, "decoupled_lr": 1e-3}, FSDP),
        ("tied-output-weight-save", {**STAGES, "save": "x"}, FSDP),
        ("mtp-tied-embeddings", {**STAGES, "untie_embeddings_and_output_weights": False}, FSDP),
        ("fsdp-output-weight", {**FSDP, **HEADS}, {"pipeline_model_parallel_size": 2}),
        ("ML-6965", REPEATED, {"disable_parameter_transpose_cache": True}),
        ("ML-6965", REPEATED, {"recompute_granularity": "full", "recompute_method": "uniform"}),
        ("tied-output-weight-ddp", {**STAGES, **OVERLAPPED}, {"untie_embeddings_and_output_weights": True}),
        ("tied-output-weight-ddp", {**STAGES, **OVERLAPPED}, FSDP),
        ("tied-output-weight-ddp", {**STAGES, **OVERLAPPED}, {"share_embeddings_and_output_weights": False}),
        ("weight-norm-before-gather", {**LAYER_WISE, **OVERLAPPED}, {"optimizer": "adam"}),
        ("ML-4494", PACKED, UNPADDED),
        ("ML-4494", {**HEADS, "offline_packing_specs": SimpleNamespace(pad_seq_to_mult=4)}, {"mtp_num_layers": None}),
        ("ML-4494", {**HEADS, "pad_seq_to_mult": 4}, {"pad_seq_to_mult": 1}),
        ("detached-overlap", {**DETACHED, "overlap_moe_expert_parallel_comm": True}, {"mtp_num_layers": None}),
        ("detached-embedding", DETACHED, {"use_distributed_optimizer": True}),
        ("detached-embedding", DETACHED, FSDP),
        ("detached-embedding", DETACHED, {"untie_embeddings_and_output_weights": False}),  # it computes the logits, too
        ("ML-7174", {"full_validation": True, "yaml_cfg": None}, {"multiple_validation_sets": True}),
        ("indexer-loss-per-token", PER_TOKEN_INDEXER, {"calculate_per_token_loss": False}),
        ("hybrid-mtp-without-padding-mask", {**HYBRID, **AUX_LOSS}, OF_MEGATRONS_TRAINER),
        ("fsdp-recomputed-repeated-head", RECOMPUTED_DEPTHS, {"recompute_granularity": "selective"}),
        ("fsdp-recomputed-repeated-head", RECOMPUTED_DEPTHS, {"data_parallel_sharding_strategy": "optim"}),
        ("ML-5750", OF_MODELOPT, {"norm_epsilon": 1e-5}),
        ("ML-5750", OF_MODELOPT, {"export_default_te_spec": True}),
        ("ML-5750", OF_MODELOPT, {"hybrid_layer_pattern": "*-"}),
        ("ML-5940", CLAMPED, {"bias_swiglu_fusion": False}),
        ("ML-5940", CLAMPED, {"swiglu": False}),
        ("ML-6682", {"sft": True, "sft_tokenizer_prompt_format": "identity"}, {"sft": False}),
        ("ML-5236", {**SHARED, "overlap_param_gather": True, "save": "x", "save_interval": 1}, FSDP),
        ("ML-5642", {"te_precision_config_file": "x"}, {"disable_parameter_transpose_cache": True}),
        ("ML-3460b", {"grad_norm_skip_threshold": 1.0}, {"check_for_nan_in_loss_and_grad": True}),
        ("ML-3460b", {"grad_norm_skip_threshold": 1.0}, {"fp16": True}),
        ("ML-3676a", LOADS_MAIN_PARAMS, {"use_distributed_optimizer": False}),
        ("ML-3676a", LOADS_MAIN_PARAMS, PRECISION_AWARE),
        ("ML-3676a", LOADS_MAIN_PARAMS, {"bf16": False}),
        ("ML-3676a", LOADS_MAIN_PARAMS, {"load": None}),
        ("ML-3676b", {**LOADS_MAIN_PARAMS, **INTERLEAVED}, {"expert_model_parallel_size": 1}),
        ("ML-3676b", {**LOADS_MAIN_PARAMS, **INTERLEAVED}, FSDP),
        ("ML-3720a", {"load": "x", "override_opt_param_scheduler": True}, FSDP),
        (
            "ML-3936",
            {**FSDP, **OF_MEGATRONS_TRAINER, **DELTA_NET, "pretrained_checkpoint": "x"},
            {"megatron_fsdp_version": 2},
        ),
        (
            "ML-5071",
            {"optimizer_cpu_offload": True, "pretrained_checkpoint": "x"},
            {"use_distributed_optimizer": False},
        ),
        ("ML-5714", {"use_torch_fsdp2": True, "quick_geglu": True, "load": "x"}, {"quick_geglu": False}),
        ("ML-6666", {"load": "x", "fp8_param_gather": True, "use_distributed_optimizer": True}, FSDP),
        ("ML-3720b", {"load": "x", "override_opt_param_scheduler": True}, FSDP),
        ("ML-2288", {"async_save": True}, {"yaml_cfg": None}),  # Megatron's trainer saves synchronously
        ("ML-3736", {"save": "x", "expert_model_parallel_size": 2}, {"ckpt_format": "torch"}),
        ("ML-6858", {**OF_MEGATRONS_TRAINER, "load": "x", "expert_model_parallel_size": 2}, {"no_load_rng": True}),
        ("fsdp-random-states-of-experts", {**LOADED_WITH_FSDP, "expert_model_parallel_size": 2}, {"finetune": True}),
        ("fsdp-random-states-of-new-ranks", {**LOADED_WITH_FSDP, **STAGES}, {"no_load_rng": True}),
        ("ML-4222", LOADED_REMAINDERS, {"dist_ckpt_optim_fully_reshardable": None}),
        ("ML-4222", LOADED_REMAINDERS, {"main_params_dtype": "float16"}),
        ("ML-5684", SAVED_LAYER_WISE, {"ckpt_format": "torch_dist"}),
        ("ML-5684", SAVED_LAYER_WISE, {"use_layer_wise_param_layout": False}),
        ("ML-3457", RECOMPUTED, {"is_of_megatron_bridge": True}),
        ("ML-3457", RECOMPUTED, {"is_of_ms_swift": True}),
        ("ML-3457", {**RECOMPUTED, "vanilla_mbridge": True, "is_of_verl": True}, {"vanilla_mbridge": False}),
        ("ML-6965", REPEATED, {"trains_adapters": True}),
        ("ML-5077", SAVED_IN_BUCKETS, {"ckpt_format": "torch"}),
        ("ML-5077", {**SAVED_IN_BUCKETS, **LAYERS_LAID_OUT}, {"use_layer_wise_param_layout": False}),
        ("ML-5077", SAVED_IN_BUCKETS, {"overlap_grad_reduce": False}),
        ("ML-5077", {**SAVED, **STAGES}, {"mtp_num_layers": None}),
        ("ML-5077", {**SAVED, **STAGES}, {"pipeline_model_parallel_size": 1}),
        ("ML-6306", ROPE, {"freeze_LM": True}),
        ("ML-6586", VLM, {"position_embedding_type": "learned_absolute"}),
        ("ML-3268", PACKED_OVER_TP, {"hybrid_context_parallel": True}),
        ("ML-4500", GRAPHS_OF_ROUTERS, {"moe_token_dispatcher_type": "alltoall"}),
        ("ML-4500", GRAPHS_OF_ROUTERS, {"hybrid_override_pattern": None}),  # a GPT
        ("ML-7213", MANY_MICROBATCHES, OF_MEGATRONS_TRAINER),
        ("ML-7213", HYBRID_CP, {"micro_batch_size": 4}),
        ("ML-3388", {"full_validation": True, "multiple_validation_sets": True}, {"multiple_validation_sets": False}),
        ("mtp-heads-without-padding-mask", {**HEADS, **AUX_LOSS}, {"hybrid_layer_pattern": "M*E/ME"}),
    ],
)
def test_one_setting_takes_a_run_out(id, affected, more):
    (defect,) = (one for one in known_defects() if one.id == id)
    assert defect.affects(RunSettings([SimpleNamespace(**affected)], None))
    assert not defect.affects(RunSettings([SimpleNamespace(**{**affected, **more})], None))
