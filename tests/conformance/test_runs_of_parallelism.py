"""Runs of Megatron-FSDP, other parallelism, CUDA graphs and fused layers that a defect affects, and others."""

from enum import Enum
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.doctor.findings import RunSettings

pytestmark = pytest.mark.forked("python")

Scope = Enum("Scope", "none layer block")  # as InferenceCudaGraphScope
SHARDED = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
DOUBLE_BUFFER = {**SHARDED, "fsdp_double_buffer": True}
FUSED_EXPERTS = {"num_experts": 4, "moe_grouped_gemm": True, "use_transformer_engine_op_fuser": True}
MXFP8 = {**SHARDED, "fp8_recipe": "mxfp8", "fp8_param_gather": True}
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
IN_FP32 = {"use_megatron_fsdp": True, "accumulate_allreduce_grads_in_fp32": True}
INSTANCES = {"num_distributed_optimizer_instances": 2, "overlap_grad_reduce": True}
FEWER_BUCKETS = {
    "ddp_reduce_scatter_with_fp32_accumulation": True,
    "fp8_param_gather": True,
    "overlap_grad_reduce": True,
}
DEALT_OUT = {"num_experts": 4, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
STAGES_OF_EXPERTS = {
    "num_experts": 4, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_layer_freq": 1,
    "mtp_num_layers": 1, "pipeline_model_parallel_size": 2,
}  # fmt: skip
GRAPHS = {"cuda_graph_impl": "local"}
COUNTED = {"num_experts": 4, **GRAPHS, "moe_router_enable_expert_bias": True}
FUSED = {"use_transformer_engine_op_fuser": True, "overlap_param_gather": True}
OF_MEGATRON = {"yaml_cfg": None}  # Megatron's own parser has read it
GROUPED = {
    "use_transformer_engine_op_fuser": True, "moe_single_grouped_weight": True, "num_experts": 4,
    "moe_grouped_gemm": True, "fp8": "e4m3", "fp8_recipe": "mxfp8",
}  # fmt: skip
MLA = {"mla_down_proj_fusion": True, "tensor_model_parallel_size": 2}
RESIDUAL = {"fp32_residual_connection": True, "bf16": True, "transformer_impl": "transformer_engine"}
LATENT = {**RESIDUAL, "multi_latent_attention": True, "num_experts": 4, "moe_layer_freq": 1}
HYBRID = {**RESIDUAL, "hybrid_layer_pattern": "M*M-"}
MUON = {
    "optimizer": "muon", "num_experts": 4, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2,
}  # fmt: skip
SHARDS = {"gtp_weight_remat_size": 2, "accumulate_allreduce_grads_in_fp32": True}
LATENT_HEADS = {"multi_latent_attention": True, "tensor_model_parallel_size": 2}
FUSED_LATENTS = {**LATENT_HEADS, "mla_down_proj_fusion": True}
GATED_DELTA_NET = {"hybrid_layer_pattern": "G*", "tensor_model_parallel_size": 2}
SPLIT_SINKS = {"softmax_type": "learnable", "context_parallel_size": 2, "tensor_model_parallel_size": 2}
UNINITIALIZED = {"perform_initialization": False, "tensor_model_parallel_size": 2}
READ_DOCUMENTS = {"reset_attention_mask": True, "bf16": True, "attention_backend": "unfused"}
SKIPS = {"grad_norm_skip_threshold": 10.0}
FP16_HEADS = {"mtp_num_layers": 1, "fp16": True}
GTP = {"gtp_weight_remat_size": 2}  # weights over more ranks than their product
GTP_GRAPHS = {**GTP, "cuda_graph_impl": "local"}
SHARED, UNTIED = ({"untie_embeddings_and_output_weights": is_untied} for is_untied in (False, True))
TIED = {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": False}


@pytest.mark.parametrize(
    "id, run, is_affected",
    [
        ("ML-4810", DOUBLE_BUFFER, True),
        ("ML-4810", {**DOUBLE_BUFFER, "data_parallel_sharding_strategy": "optim_grads"}, False),
        ("ML-4990", {**SHARDED, **FUSED_EXPERTS, "overlap_moe_expert_parallel_comm": True}, True),
        ("ML-4990", {**SHARDED, **FUSED_EXPERTS}, False),
        ("ML-4990", {**SHARDED, "num_experts": 4, "overlap_moe_expert_parallel_comm": True}, False),
        ("ML-3991", {**MXFP8, **FULL}, True),
        ("ML-3991", {**MXFP8, **SELECTIVE, "recompute_modules": ["mlp"]}, True),
        ("ML-3991", {**MXFP8, **SELECTIVE}, False),
        ("ML-3991", {**MXFP8, **SELECTIVE, "recompute_modules": ["layernorm", "moe_act"]}, False),
        ("ML-3991", {**MXFP8, "overlap_moe_expert_parallel_comm": True}, False),
        ("ML-5462", {**IN_FP32, "bf16": True}, True),
        ("ML-5462", {**IN_FP32, "fp16": True}, True),
        ("ML-5462", {**IN_FP32, "bf16": True, "accumulate_allreduce_grads_in_fp32": False}, False),
        ("ML-3693", INSTANCES, True),
        ("ML-3693", {**INSTANCES, "use_megatron_fsdp": True}, False),
        ("ML-4410", FEWER_BUCKETS, True),
        ("ML-4410", {**FEWER_BUCKETS, "overlap_grad_reduce": False}, False),
        ("ML-4410", {**FEWER_BUCKETS, "use_megatron_fsdp": True}, False),
        ("ML-4410", {**FEWER_BUCKETS, "fp8_param_gather": False}, False),
        ("ML-4410b", FEWER_BUCKETS, False),
        ("ML-4410b", {**FEWER_BUCKETS, "virtual_pipeline_model_parallel_size": 2}, True),
        ("ML-2840", {**INSTANCES, **DEALT_OUT, "use_megatron_fsdp": True}, True),
        ("ML-2840", {**INSTANCES, **DEALT_OUT, "use_megatron_fsdp": True, "expert_tensor_parallel_size": 1}, False),
        ("ML-3401", STAGES_OF_EXPERTS, False),
        ("ML-3401", {**STAGES_OF_EXPERTS, "moe_layer_freq": [0, 1]}, True),
        ("ML-3401", {**STAGES_OF_EXPERTS, "account_for_embedding_in_pipeline_split": True}, True),
        ("ML-5975", {**GRAPHS, "inference_cuda_graph_scope": Scope.layer, "cuda_graph_modules": []}, True),
        ("ML-5975", {**GRAPHS, "inference_cuda_graph_scope": Scope.block, "cuda_graph_modules": []}, False),
        ("ML-5975", {**GRAPHS, "inference_cuda_graph_scope": "block", "cuda_graph_modules": ["attn"]}, True),
        ("ML-4433b", {**COUNTED, "cuda_graph_scope": "full"}, True),
        ("ML-4433b", {**COUNTED, "cuda_graph_scope": ["moe_router"]}, True),
        ("ML-4433b", {**COUNTED, "cuda_graph_scope": ["attn"]}, False),
        ("ML-4162", {**GRAPHS, "rl_use_sequence_packing": True}, True),
        ("ML-4162", {**GRAPHS, "rl_use_sequence_packing": False, "sft": True}, False),
        ("ML-6373", {**GRAPHS, **SELECTIVE, "recompute_modules": ["core_attn", "layernorm"]}, True),
        ("ML-6373", {**GRAPHS, **SELECTIVE, "recompute_modules": ["core_attn", "moe_act"]}, False),
        ("ML-6373", {**GRAPHS, **SELECTIVE}, False),
        ("ML-6132", FUSED, True),
        ("ML-6132", {**FUSED, **OF_MEGATRON}, False),  # before 0.19
        ("ML-6132", {**FUSED, **OF_MEGATRON, "gtp_weight_remat_size": 1}, True),
        ("ML-6132", {**FUSED, "num_experts": 4, "moe_layer_freq": 2}, False),
        ("ML-6132", {**FUSED, "hybrid_layer_pattern": "M*-"}, False),
        ("ML-5487b", GROUPED, True),
        ("ML-5487b", {**GROUPED, "moe_grouped_gemm": False}, False),
        ("ML-5487b", {**GROUPED, "fp8_recipe": "blockwise"}, False),
        ("ML-5383", MLA, True),
        ("ML-5383", {**MLA, "hybrid_layer_pattern": "M*"}, False),
        ("ML-5383", {**MLA, "experimental_attention_variant": "dsa"}, False),
        ("ML-5273", {**MLA, "delay_wgrad_compute": True, "transformer_impl": "local"}, False),
        ("ML-6839", {**LATENT_HEADS, "num_experts": 4}, False),  # a layer of experts asks for sequence parallelism
        ("ML-6839", {**LATENT_HEADS, "transformer_impl": "local"}, False),
        ("ML-6839", {**LATENT_HEADS, "hybrid_layer_pattern": "M*"}, False),
        ("ML-6839", {**LATENT_HEADS, "hybrid_layer_pattern": "M+"}, True),
        ("ML-1699", {**FUSED_LATENTS, "sequence_parallel": True}, True),
        ("ML-1699", {**FUSED_LATENTS, "sequence_parallel": True, "num_experts": 4}, True),
        ("ML-1699", {**FUSED_LATENTS, "num_experts": 4}, False),
        ("ML-1699", {**FUSED_LATENTS, "transformer_impl": "local"}, False),
        ("ML-1699", {**FUSED_LATENTS, "experimental_attention_variant": "dsa"}, False),
        ("ML-7452k", GATED_DELTA_NET, True),
        ("ML-7452k", {**GATED_DELTA_NET, "num_experts": 4}, False),
        ("ML-2357", {**READ_DOCUMENTS, "pipeline_model_parallel_size": 2}, False),
        ("ML-2357", {**READ_DOCUMENTS, "pipeline_model_parallel_size": 4}, True),  # middle stages get no mask
        ("sinks-with-cp", {**SPLIT_SINKS, "cp_comm_type": ["a2a", "p2p"]}, False),
        ("ML-7530", SPLIT_SINKS, True),
        ("ML-7530", {**SPLIT_SINKS, "clip_grad": 0.0}, False),
        ("ML-4084", UNINITIALIZED, True),
        ("ML-4084", {**UNINITIALIZED, "clip_grad": 0.0}, False),
        ("ML-3213", LATENT_HEADS, True),
        ("ML-3213", {**LATENT_HEADS, "clip_grad": 0.0}, False),
        ("ML-3460", SKIPS, True),
        ("ML-3460", {**SKIPS, **SHARDED}, False),
        ("ML-3460b", SKIPS, True),
        ("ML-3460b", {**SKIPS, **SHARDED}, False),
        ("ML-3460b", {**SKIPS, "bf16": True, "loss_scale": 1.0}, False),  # the scaler looks for NaN
        ("ML-3460c", {**SKIPS, **SHARDED}, True),
        ("ML-3460c", {**SKIPS, **SHARDED, "virtual_pipeline_model_parallel_size": 2}, False),
        ("mtp-loss-of-skipped-steps", FP16_HEADS, True),
        ("mtp-loss-of-skipped-steps", {**FP16_HEADS, "log_interval": 1}, False),
        ("ML-6272", RESIDUAL, True),
        ("ML-6272", {**RESIDUAL, "transformer_impl": "local"}, False),
        ("ML-6272", {**LATENT, "mla_down_proj_fusion": False}, False),
        ("ML-6272", {**LATENT, "mla_down_proj_fusion": True}, True),
        ("ML-6272", {**LATENT, "mla_down_proj_fusion": False, "moe_layer_freq": [0, 1]}, True),
        ("ML-6272", {**LATENT, "mla_down_proj_fusion": False, "moe_layer_freq": [1, 1]}, False),
        ("ML-6272", {**LATENT, "num_experts": None}, False),  # 0.16
        ("ML-6272", HYBRID, True),
        ("ML-6272", {**HYBRID, "hybrid_layer_pattern": "MEME"}, False),
        ("ML-6272", {**RESIDUAL, "hybrid_override_pattern": "M*M-"}, False),
        ("ML-6272", {**RESIDUAL, "hybrid_override_pattern": "*MM-"}, True),
        ("ML-3504", {**RESIDUAL, "hybrid_override_pattern": "M*M-"}, True),
        ("ML-3504", {**RESIDUAL, "multi_latent_attention": True}, True),
        ("ML-3504", {**RESIDUAL, "transformer_impl": "local"}, False),
        ("ML-6616", MUON, True),
        ("ML-6616", {**MUON, "optimizer": "soap"}, True),
        ("ML-6616", {**MUON, "expert_model_parallel_size": 1}, False),
        ("ML-6616", {**MUON, "optimizer": "dist_muon"}, False),
        ("ML-6616", {**MUON, "use_layer_wise_distributed_optimizer": True}, False),
        ("ML-6624", {**SHARDS, "fp16": True}, True),
        ("ML-6624", {**SHARDS, "bf16": True, "accumulate_allreduce_grads_in_fp32": False}, False),
        ("ML-6242", {**GTP, "share_embeddings_and_output_weights": True}, True),
        ("ML-6242", {**GTP, "mtp_num_layers": 1, "pipeline_model_parallel_size": 2}, True),
        ("ML-6242", {**GTP, **SHARED}, True),
        ("ML-6242", {**GTP, **SHARED, "pipeline_model_parallel_size": 2}, False),
        ("ML-6242", {**GTP_GRAPHS, "mtp_num_layers": 1}, False),
        ("ML-6565", {**GTP_GRAPHS, **SHARED}, True),
        ("ML-6565", {**GTP_GRAPHS, "mtp_num_layers": 1}, True),
        ("ML-6565", {**GTP_GRAPHS, **UNTIED}, False),
        ("ML-6565", {**GTP_GRAPHS, "mtp_num_layers": 1, "pipeline_model_parallel_size": 2}, False),
        ("ML-6565", {**GTP, **SHARED}, False),
        ("ML-6242b", {**GTP_GRAPHS, **UNTIED, "mtp_num_layers": 1}, True),
        ("ML-6242b", {**GTP_GRAPHS, **SHARED, "mtp_num_layers": 1}, False),
        ("ML-6242b", {**GTP, **UNTIED, "mtp_num_layers": 1}, False),
        ("mtp-tied-embeddings", {**TIED, "defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 0}, False),
        ("mtp-tied-embeddings", {**TIED, "defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 2}, True),
    ],
)
def test_a_run_and_one_just_outside(find_affecting, id, run, is_affected):
    assert (id in find_affecting(run)) is is_affected


@pytest.mark.parametrize(
    "id, run, is_left",
    [
        ("ML-5642", {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}, True),
        ("ML-5642", {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, False),
        ("ML-5642", {"cuda_graph_impl": "none"}, False),
        ("ML-3460c", {"optimizer_cuda_graph": True}, True),
        ("ML-3460c", {"optimizer_cuda_graph": False}, False),
        ("ML-5916", {"use_megatron_fsdp": True, "init_model_with_meta_device": True}, True),
        ("ML-5916", {"use_megatron_fsdp": True}, False),
        ("ML-7498b", {"hybrid_context_parallel": True}, True),
        ("ML-7498b", {"hybrid_context_parallel": False}, False),
    ],
)
def test_runs_from_which_a_patch_does_not_remove_a_defect(id, run, is_left):
    (defect,) = (one for one in known_defects() if one.id == id)
    assert bool(defect.unless.affects(RunSettings([SimpleNamespace(**run)], None))) is is_left
