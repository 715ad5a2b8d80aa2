"""Whether a defect affects a run: cases of its predicate, and that its words name what the predicate reads."""

import re
from types import CodeType, FunctionType, SimpleNamespace

import pytest
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.doctor.findings import RunSettings

pytestmark = pytest.mark.forked("python")

PARSED = {"yaml_cfg": None}  # by Megatron's own parser, so its own trainer trains
GRAPHS = {"cuda_graph_impl": "local"}
OVERLAPPED = {"overlap_grad_reduce": True}
PACKED = {"sft": True, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
SHARDED = {"gtp_weight_remat_size": 2, "num_experts": 4}  # weights over more ranks than their product
SHARDED_EXPERTS = {**SHARDED, "expert_gtp_weight_remat_size": 4}
FSDP_TIED = {"use_megatron_fsdp": True, "untie_embeddings_and_output_weights": False}
HEADS_TIED = {"untie_embeddings_and_output_weights": False, "mtp_num_layers": 1, "pipeline_model_parallel_size": 2}
INSTANCES = {"use_megatron_fsdp": True, "num_distributed_optimizer_instances": 2}
SHARED_OUT = {
    **INSTANCES, "data_parallel_sharding_strategy": "optim_grads_params", "outer_dp_sharding_strategy": "optim",
}  # fmt: skip
GATED = {"attention_output_gate": True, "num_query_groups": 2, "tensor_model_parallel_size": 4}
MLA = {"multi_latent_attention": True, "tensor_model_parallel_size": 2}
SINKS = {"softmax_type": "learnable", "context_parallel_size": 2, "cp_comm_type": ["a2a"]}
DOCUMENTS = {"reset_attention_mask": True, "bf16": True, "attention_backend": SimpleNamespace(name="auto")}
WEIGHT_NORM = {"log_params_norm": True, "world_size": 2}
GATHERED_LATE = {**WEIGHT_NORM, "use_distributed_optimizer": True, "overlap_param_gather": True}
PRECISION_AWARE = {**WEIGHT_NORM, "bf16": True, "use_precision_aware_optimizer": True}
TENSORWISE = {**PRECISION_AWARE, "fp8_recipe": "tensorwise"}
EXPERTS_IN_FSDP = {**WEIGHT_NORM, "use_megatron_fsdp": True, "num_experts": 4, "expert_model_parallel_size": 2}
ALL_TO_ALL = {"moe_token_dispatcher_type": "alltoall"}
SINKHORN = {"num_experts": 4, "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1}
Z_LOSS = {"num_experts": 4, "moe_z_loss_coeff": 1e-3, "world_size": 4}

TWO_MICROBATCHES = {"global_batch_size": 2, "micro_batch_size": 1}
SPARSE = {"experimental_attention_variant": "dsa", "dsa_indexer_loss_coeff": 0.1}
CLIPPED = {"qk_clip": True, "bf16": True}
ROPE = {"use_rope_scaling": True, "rope_scaling_factor": 32}
FSDP = {"use_megatron_fsdp": True, "bf16": True}
AUX_LOSS = {"num_experts": 4, "moe_aux_loss_coeff": 0.1}
SINGLE_REPLICAS = {
    **FSDP, **TWO_MICROBATCHES, "data_parallel_sharding_strategy": "optim_grads", "num_experts": 4, "world_size": 2,
    "expert_model_parallel_size": 2, "global_batch_size": 4,
}  # fmt: skip
TWO_PARTS = {"world_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
MUON = {"optimizer": "muon", "use_distributed_optimizer": True}
FUSED_EXPERTS = {
    **FSDP, **TWO_MICROBATCHES, "data_parallel_sharding_strategy": "optim", "num_experts": 4, "moe_grouped_gemm": True,
    "use_transformer_engine_op_fuser": True, "recompute_granularity": "selective", "recompute_modules": ["moe"],
}  # fmt: skip


@pytest.mark.parametrize(
    "id, run, is_affected",
    [
        ("ML-5975", GRAPHS, True),
        ("ML-5975", {**GRAPHS, "cuda_graph_scope": ["full_iteration"]}, False),
        # 0.16 and 0.17 ask for it in training, too
        ("ML-5975", {**GRAPHS, "moe_pad_experts_for_cuda_graph_inference": True}, True),
        ("ML-5975", {**GRAPHS, "perform_rl_step": True}, False),  # generates text by graphs, trains without
        ("ML-5975", {**GRAPHS, "perform_rl_step": True, "rl_training_cuda_graphs": True}, True),
        ("ML-5975", {"cuda_graph_impl": "transformer_engine"}, False),
        ("fsdp-weight-norm-without-other-experts", EXPERTS_IN_FSDP, True),
        ("fsdp-weight-norm-without-other-experts", {**EXPERTS_IN_FSDP, "log_params_norm": False}, False),
        ("fsdp-weight-norm-without-other-experts", {**EXPERTS_IN_FSDP, "expert_model_parallel_size": 1}, False),
        ("fsdp-weight-norm-without-other-experts", {**EXPERTS_IN_FSDP, "use_megatron_fsdp": False}, False),
        ("weight-norm-before-gather", GATHERED_LATE, True),
        ("weight-norm-before-gather", {**GATHERED_LATE, "bf16": True}, False),  # of the main parameters
        ("weight-norm-before-gather", {**GATHERED_LATE, "overlap_param_gather": False}, False),
        ("weight-norm-before-gather", {**GATHERED_LATE, "tensor_model_parallel_size": 2}, False),
        ("weight-norm-before-gather", {**GATHERED_LATE, "context_parallel_size": 2}, True),
        ("weight-norm-before-gather", {**GATHERED_LATE, "use_megatron_fsdp": True}, False),
        ("weight-norm-of-precision-aware-optimizer", PRECISION_AWARE, True),
        ("weight-norm-of-precision-aware-optimizer", {**PRECISION_AWARE, "bf16": False}, False),
        ("weight-norm-of-precision-aware-optimizer", TENSORWISE, False),
        ("weight-norm-of-precision-aware-optimizer", {**TENSORWISE, "main_params_dtype": "fp16"}, True),
        ("weight-norm-of-precision-aware-optimizer", {**TENSORWISE, "optimizer_cpu_offload": True}, True),
        ("transposed-router-gradients", SINKHORN, True),
        ("transposed-router-gradients", {**SINKHORN, "moe_router_load_balancing_type": ["sinkhorn"]}, True),
        ("transposed-router-gradients", {**SINKHORN, "moe_permute_fusion": True}, True),  # not of all-gathers
        ("transposed-router-gradients", {**SINKHORN, "expert_model_parallel_size": 2}, False),
        ("transposed-router-gradients", {**SINKHORN, "tensor_model_parallel_size": 2}, False),
        ("transposed-router-gradients", {**SINKHORN, "moe_router_topk": 2}, False),
        ("transposed-router-gradients", {**SINKHORN, "moe_router_dtype": "fp64"}, False),
        ("transposed-router-gradients", {**SINKHORN, **ALL_TO_ALL, "expert_model_parallel_size": 2}, True),
        ("transposed-router-gradients", {**SINKHORN, **ALL_TO_ALL, "moe_permute_fusion": True}, False),
        ("transposed-router-gradients", {**SINKHORN, "moe_token_dispatcher_type": "flex"}, False),
        ("sinkhorn-without-bound", SINKHORN, True),
        ("sinkhorn-without-bound", {**SINKHORN, "moe_router_load_balancing_type": ["aux_loss"]}, False),
        ("sinkhorn-without-bound", {**SINKHORN, "num_experts": None}, False),
        ("ML-6238", {**PARSED, "log_interval": 1}, True),
        ("ML-6238", {**PARSED, "log_interval": 10}, False),
        ("ML-6238", {**PARSED, "log_interval": 10, "load": "x"}, True),
        ("ML-6238", {**PARSED, "log_interval": 10, "load": "x", "finetune": True}, False),
        ("ML-6238", {"log_interval": 1}, False),
        ("ML-4103", PACKED, True),
        ("ML-4103", {**PACKED, "mtp_num_layers": 1}, False),
        ("ML-4103", {**PACKED, "virtual_pipeline_model_parallel_size": 2}, False),
        ("ML-4103b", PACKED, False),
        ("ML-4103b", {**PACKED, "pipeline_model_parallel_size": 4}, True),
        ("ML-4103c", {**PACKED, "context_parallel_size": 2}, True),
        ("ML-4103c", {**PACKED, "context_parallel_size": 2, "hybrid_context_parallel": True}, False),
        ("ML-4103c", {**PACKED, "context_parallel_size": 2, "hybrid_layer_pattern": "M*"}, False),
        ("ML-4899", {"hybrid_layer_pattern": "M-", "load": "x", "ckpt_format": "torch"}, True),
        ("ML-4899", {"hybrid_layer_pattern": "M-", "load": "x", "ckpt_format": "torch_dist"}, False),
        ("ML-4410", {**OVERLAPPED, "ddp_reduce_scatter_with_fp32_accumulation": True, "fp8_param_gather": True}, True),
        # that of DistributedDataParallelConfig
        ("ML-4410", {**OVERLAPPED, "reduce_scatter_with_fp32_accumulation": True, "fp4_param_gather": True}, True),
        ("ML-6278", {"num_experts": 4, "moe_latent_size": 8}, True),
        ("ML-6278", {"num_experts": 4, "moe_latent_size": 8, "pretrained_checkpoint": "x"}, False),
        ("ML-6080", SHARDED_EXPERTS, True),
        ("ML-6080", {**SHARDED_EXPERTS, "gtp_weight_remat_size": 4}, False),
        ("ML-6080", {**SHARDED_EXPERTS, "expert_gtp_weight_remat_size": 1}, False),
        ("ML-6080", {**SHARDED_EXPERTS, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, False),
        ("fsdp-tied-embeddings", {"use_megatron_fsdp": True, "share_embeddings_and_output_weights": True}, True),
        ("fsdp-tied-embeddings", {**FSDP_TIED, "gradient_accumulation_fusion": False}, False),
        ("fsdp-tied-embeddings", {**FSDP_TIED, "use_megatron_fsdp": False}, False),
        ("fsdp-tied-embeddings", {**FSDP_TIED, "freeze_base_model_for_mtp": True}, False),
        ("mtp-tied-embeddings", HEADS_TIED, True),
        ("mtp-tied-embeddings", {**HEADS_TIED, "pipeline_model_parallel_size": 1}, False),
        ("mtp-tied-embeddings", {**HEADS_TIED, "pipeline_model_parallel_layout": "Et|m|L"}, False),
        ("mtp-tied-embeddings", {**HEADS_TIED, "mtp_detach_heads": True}, False),
        ("mtp-tied-embeddings", {**HEADS_TIED, "gtp_weight_remat_size": 2}, False),
        ("mtp-tied-embeddings", {**HEADS_TIED, "untie_embeddings_and_output_weights": True}, False),
        ("ML-6839", MLA, True),
        ("ML-6839", {**MLA, "sequence_parallel": True}, False),
        ("ML-6839", {**MLA, "tensor_model_parallel_size": 1}, False),
        ("ML-6839", {**MLA, "multi_latent_attention": False}, False),
        ("ML-6839", {**MLA, "mla_down_proj_fusion": True}, False),
        ("ML-1699", {**MLA, "mla_down_proj_fusion": True}, True),
        ("ML-1699", {**MLA, "mla_down_proj_fusion": True, "tensor_model_parallel_size": 1}, False),
        ("ML-1699", MLA, False),
        ("ML-3213", MLA, True),
        ("ML-3213", {**MLA, "transformer_impl": "local"}, False),
        ("ML-3213", {**MLA, "tensor_model_parallel_size": 1}, False),
        ("ML-3213", {"tensor_model_parallel_size": 2, "num_experts": 4, "moe_latent_size": 8}, True),
        ("ML-3213", {"tensor_model_parallel_size": 2, "num_experts": 4}, False),
        ("sinks-with-cp", SINKS, True),
        ("sinks-with-cp", {**SINKS, "cp_comm_type": "a2a"}, True),
        ("sinks-with-cp", {**SINKS, "cp_comm_type": ["p2p"]}, False),
        ("sinks-with-cp", {**SINKS, "softmax_type": "off-by-one"}, False),
        ("sinks-with-cp", {**SINKS, "context_parallel_size": 1}, False),
        ("ML-2357", DOCUMENTS, True),
        ("ML-2357", {**DOCUMENTS, "reset_attention_mask": False}, False),
        ("ML-2357", {**DOCUMENTS, "bf16": False}, False),
        ("ML-2357", {**DOCUMENTS, "sft": True}, False),
        ("ML-2357", {**DOCUMENTS, "transformer_impl": "local", "masked_softmax_fusion": False}, False),
        ("ML-2357", {**DOCUMENTS, "attention_backend": SimpleNamespace(name="unfused")}, False),
        (
            "ML-2357",
            {**DOCUMENTS, "attention_backend": "unfused", "create_attention_mask_in_dataloader": False},
            True,
        ),
        ("ML-3199", {**Z_LOSS, "context_parallel_size": 2}, True),
        ("ML-3199", Z_LOSS, False),
        ("ML-3199b", Z_LOSS, True),
        ("ML-3199b", {**Z_LOSS, "context_parallel_size": 4}, False),
        ("ML-4891", SHARED_OUT, True),
        ("ML-4891", {**SHARED_OUT, "megatron_fsdp_version": 2}, False),
        ("ML-4891", {**SHARED_OUT, "outer_dp_sharding_strategy": "no_shard"}, False),
        ("ML-4891b", INSTANCES, True),
        ("ML-4891b", {**INSTANCES, "overlap_grad_reduce": True}, False),
        ("ML-4891b", {**INSTANCES, "num_distributed_optimizer_instances": 1}, False),
        ("fsdp-instances-sum-gradients", SHARED_OUT, True),
        ("fsdp-instances-sum-gradients", {**SHARED_OUT, "calculate_per_token_loss": True}, False),
        ("fsdp-pipeline-stages", {"use_megatron_fsdp": True, "pipeline_model_parallel_size": 2}, True),
        ("fsdp-pipeline-stages", {"use_megatron_fsdp": True, "pipeline_model_parallel_size": 1}, False),
        ("ML-7338", {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}, True),
        ("ML-7338", {"use_precision_aware_optimizer": True, "main_grads_dtype": "fp32"}, False),
        ("ML-3575", GATED, True),
        ("ML-3575", {**GATED, "group_query_attention": False}, False),
        ("ML-3575", {**GATED, "tensor_model_parallel_size": 2}, False),
        ("ML-5383", {"mla_down_proj_fusion": True, "tensor_model_parallel_size": 2}, True),
        ("ML-5383", {"mla_down_proj_fusion": True, "tensor_model_parallel_size": 1}, False),
        ("ML-5273", {"mla_down_proj_fusion": True, "delay_wgrad_compute": True}, True),
        ("ML-4070", {**SPARSE, **TWO_MICROBATCHES}, True),
        ("ML-4070", SPARSE, False),
        ("ML-4070", {**SPARSE, "fp16": True}, True),
        ("ML-3026a", {**SPARSE, "qk_layernorm": True}, True),
        ("ML-3026a", {**SPARSE, "qk_layernorm": True, "hybrid_layer_pattern": "MDMD"}, False),
        ("ML-6306", ROPE, True),
        ("ML-6306", {**ROPE, "rope_scaling_factor": 8}, False),
        ("ML-6306", {**ROPE, "hybrid_override_pattern": "M*M*"}, False),
        ("ML-6306", {**ROPE, "is_hybrid_model": True}, False),
        ("ML-6586", ROPE, False),
        ("ML-6586", {**ROPE, "freeze_LM": False}, True),  # a flag that only scripts of vision models have
        ("ML-6586", {"rotary_base": 500000, "dataloader_seq_length": 8}, True),
        ("ML-6586", {"rotary_base": 500000, "dataloader_seq_length": 8, "script": "train.py"}, False),
        ("ML-6586", {"rotary_base": 10000, "dataloader_seq_length": 8}, False),
        ("ML-4395", {"transformer_impl": "local"}, False),
        ("ML-4395", {"transformer_impl": "local", "freeze_ViT": True}, True),
        ("ML-4705a", {"load": "x", "decoupled_lr": 1e-3}, True),
        ("ML-4705a", {"load": "x", "decoupled_lr": 1e-3, "use_megatron_fsdp": True}, False),
        ("ML-4705a", {"load": "x", "decoupled_lr": 1e-3, "optimizer": "dist_muon"}, False),
        ("ML-4705a", {"load": "x", "decoupled_lr": 1e-3, "load_optim": False}, False),  # in Megatron-Bridge
        ("ML-7173", {**PARSED, "load": "x", "decoupled_lr": 1e-3, "override_opt_param_scheduler": True}, True),
        ("ML-7173", {"load": "x", "decoupled_lr": 1e-3, "override_opt_param_scheduler": True}, False),
        ("ML-4133", {"use_megatron_fsdp": True, "use_precision_aware_optimizer": True}, True),
        (
            "ML-4133",
            {"use_megatron_fsdp": True, "use_precision_aware_optimizer": True, "optimizer_cpu_offload": True},
            False,
        ),
        ("ML-4133b", {**FSDP, "load": "x"}, False),
        ("ML-4133b", {**FSDP, "load": "x", "finetune": True}, True),
        ("ML-4133b", {**FSDP, "pretrained_checkpoint": "x"}, True),
        ("ML-4133b", {**FSDP, "pretrained_checkpoint": "x", "megatron_fsdp_version": 2}, False),
        ("fsdp-gradients-of-single-replicas", {**SINGLE_REPLICAS, "megatron_fsdp_version": 1}, True),
        ("fsdp-gradients-of-single-replicas", {**SINGLE_REPLICAS, "megatron_fsdp_version": 2}, False),
        ("ML-6660b", {**SINGLE_REPLICAS, "megatron_fsdp_grad_comm_dtype": "bf16"}, False),
        ("ML-6660b", {**SINGLE_REPLICAS, "megatron_fsdp_grad_comm_dtype": "bf16", "bf16": False}, True),
        ("ML-4646", {**CLIPPED, "use_distributed_optimizer": True}, True),
        ("ML-4646", CLIPPED, False),
        ("ML-4646", {"log_max_attention_logit": True, "bf16": False}, True),
        ("ML-4646", {"log_max_attention_logit": True, "bf16": True, "use_distributed_optimizer": True}, False),
        ("ML-4646", {"log_max_attention_logit": True, "bf16": True, "hybrid_layer_pattern": "M*"}, True),
        ("ML-4646", {**FSDP, "log_max_attention_logit": True}, True),
        ("ML-4646", {**FSDP, "log_max_attention_logit": True, "bf16": False}, False),
        ("ML-5462", {**FSDP, "accumulate_allreduce_grads_in_fp32": True}, True),
        ("ML-5462", {**FSDP, "accumulate_allreduce_grads_in_fp32": True, "megatron_fsdp_version": 2}, True),
        ("ML-4433b", {**GRAPHS, "num_experts": 4, "moe_router_enable_expert_bias": True}, True),
        ("ML-4433b", {**GRAPHS, "moe_router_enable_expert_bias": True}, False),
        ("ML-4433b", {**GRAPHS, **AUX_LOSS, "moe_router_load_balancing_type": "global_aux_loss"}, True),
        ("ML-4433b", {**GRAPHS, **AUX_LOSS, "moe_router_load_balancing_type": "aux_loss"}, False),
        ("ML-4113", MUON, True),  # the file does not say how many ranks there are
        ("ML-4113", {**MUON, "use_distributed_optimizer": False}, False),
        ("ML-4113", {**MUON, "optimizer": "adam"}, False),
        ("ML-4113", {**MUON, "optimizer": "dist_muon"}, False),
        ("ML-4113", {**MUON, "use_layer_wise_distributed_optimizer": True}, False),
        ("ML-4113", {**MUON, "use_megatron_fsdp": True}, False),
        ("ML-4113", {**MUON, "world_size": 2, "context_parallel_size": 2}, True),
        ("ML-4113", {**MUON, **TWO_PARTS}, False),
        ("ML-4113", {**MUON, **TWO_PARTS, "num_experts": 4}, True),
        ("fsdp-fused-experts-keep-last-microbatch", FUSED_EXPERTS, True),
        ("fsdp-fused-experts-keep-last-microbatch", {**FUSED_EXPERTS, "use_transformer_engine_op_fuser": False}, False),
        ("fsdp-fused-experts-keep-last-microbatch", {**FUSED_EXPERTS, "gradient_accumulation_fusion": False}, False),
        ("fsdp-fused-experts-keep-last-microbatch", {**FUSED_EXPERTS, "recompute_modules": ["moe_act"]}, False),
        ("fsdp-fused-experts-keep-last-microbatch", {**FUSED_EXPERTS, "recompute_granularity": "full"}, False),
    ],
)
def test_which_settings_decide(find_affecting, id, run, is_affected):
    assert (id in find_affecting(run)) is is_affected


@pytest.mark.parametrize(
    "version, more, is_affected",
    [("2.17.1", {}, True), ("2.18.0", {}, False), ("2.17.1", {"logit_dtype": "torch.float32"}, False)],
)
def test_the_fused_cross_entropy_depends_on_transformer_engine(find_affecting, version, more, is_affected):
    run = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te", "bf16": True, **more}
    assert ("ML-5115" in find_affecting(run, te=version)) is is_affected


def test_the_log_of_other_trainers_keeps_what_only_megatron_s_trainer_is_repaired_of():
    (defect,) = (one for one in known_defects() if one.id == "ML-6748")
    assert defect.unless.affects(RunSettings([SimpleNamespace()], None))
    assert not defect.unless.affects(RunSettings([SimpleNamespace(), SimpleNamespace(yaml_cfg=None)], None))


# The flags that decide a setting of another name.
DECIDED_BY = {
    "accumulate_allreduce_grads_in_fp32": ["grad_reduce_in_bf16"],
    "add_bias_linear": ["disable_bias_linear"],
    "apply_rope_fusion": ["no_rope_fusion"],
    "expert_gtp_weight_remat_size": ["expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"],
    "fp4": ["fp4_format"],
    "fp8": ["fp8_format"],
    "gtp_weight_remat_size": ["tensor_parallel_num_weight_shards", "tensor_model_parallel_size"],
    "nccl_ub": ["use_nccl_ub"],
    "overlap_p2p_comm": ["no_overlap_p2p_communication"],
    "perform_initialization": ["no_initialization"],
    "use_layer_wise_distributed_optimizer": ["use_distributed_optimizer"],
    "virtual_pipeline_model_parallel_size": ["num_virtual_stages_per_pipeline_rank"],
}


def names_in(code, scope):
    """The names in the code of a predicate and of the functions that it calls."""
    names = set(code.co_names)
    for one in code.co_consts:
        names |= names_in(one, scope) if isinstance(one, CodeType) else set()
    for called in (scope.get(name) for name in code.co_names):
        names |= names_in(called.__code__, called.__globals__) if isinstance(called, FunctionType) else set()
    return names


def test_the_predicate_of_a_defect_reads_each_flag_that_its_words_name():
    unread = {}
    for defect in known_defects():
        names = names_in(defect.affects.__code__, defect.affects.__globals__)
        flags = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--(\w[\w-]*)", defect.when)}
        readable = names.union(*(DECIDED_BY.get(name, ()) for name in names))
        if left := {flag for flag in flags if not {flag, flag.removeprefix("no_")} & readable}:
            unread[defect.id] = left
    never = {defect.id for defect in known_defects() if not defect.affects.__code__.co_names}
    message = "`affects`, or a function that it calls, reads each of these as an attribute: run.NAME"
    assert {id: flags for id, flags in unread.items() if id not in never} == {}, message
