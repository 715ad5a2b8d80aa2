"""Runs of attention, packs, resumes and logs that a defect affects, and runs that differ from them by a setting."""

import pytest

pytestmark = pytest.mark.forked("python")

MLA = {"multi_latent_attention": True, "tensor_model_parallel_size": 2}
SPARSE = {**MLA, "experimental_attention_variant": "dsa"}
FUSED_HYBRID = {**MLA, "mla_down_proj_fusion": True, "sequence_parallel": True}
LOCAL = {"reset_attention_mask": True, "bf16": True, "transformer_impl": "local", "seq_length": 4096}
RESUMED = {"load": "x", "use_mup": True, "hidden_size": 64}
OVERRIDDEN = {**RESUMED, "override_opt_param_scheduler": True, "yaml_cfg": None}
WEIGHT_NORM = {"log_params_norm": True, "bf16": True, "overlap_param_gather": True, "data_parallel_size": 2}
IN_BATCHES = {"mtp_num_layers": 1, "enable_in_batch_packing": True, "tensor_model_parallel_size": 2}
ROLLOUTS = {"mtp_num_layers": 1, "rl_use_sequence_packing": True, "rl_rollout_bank_max_bytes": 0}
DOCUMENTS = {"dataloader_inter_document_masking": True, "context_parallel_size": 2}
EXPERTS = {
    "optimizer": "dist_muon", "bf16": True, "num_experts": 4, "add_bias_linear": True, "tensor_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "id, run, is_affected",
    [
        ("ML-6839", SPARSE, True),  # before 0.19
        ("ML-6839", {**SPARSE, "mla_down_proj_fusion": True}, True),  # which sparse attention does not read
        ("ML-6839", {**SPARSE, "gtp_weight_remat_size": 1}, False),  # refused
        ("ML-6839", {**SPARSE, "sequence_parallel": True}, False),
        ("ML-6839", {**MLA, "gtp_weight_remat_size": 1}, True),
        ("ML-6839", {**MLA, "is_of_ms_swift": True}, False),
        ("ML-6839", {**MLA, "hybrid_layer_pattern": "MD"}, True),
        ("ML-1699", {**SPARSE, **FUSED_HYBRID}, False),
        ("ML-1699", {**FUSED_HYBRID, "hybrid_layer_pattern": "D+"}, True),
        ("ML-1699", {**FUSED_HYBRID, "hybrid_layer_pattern": "D+", "sequence_parallel": False}, False),  # refused
        ("ML-1699", {**FUSED_HYBRID, "hybrid_layer_pattern": "MD"}, False),
        ("ML-2357", LOCAL, True),
        ("ML-2357", {**LOCAL, "bf16": False}, False),
        ("ML-2357", {**LOCAL, "bf16": False, "window_size": (8, 0)}, True),
        ("ML-2357", {**LOCAL, "masked_softmax_fusion": False}, False),
        ("ML-2357", {**LOCAL, "softmax_type": "learnable"}, False),
        ("ML-2357", {**LOCAL, "seq_length": 8192}, False),
        ("ML-2357", {**LOCAL, "seq_length": 4094}, False),
        ("ML-2357", {**LOCAL, "micro_batch_size": 1, "num_attention_heads": 6}, False),
        ("ML-2357", {**LOCAL, "micro_batch_size": 2, "num_attention_heads": 6}, True),
        ("ML-4705a", {**RESUMED, "mup_base_hidden_size": 32}, True),
        ("ML-4705a", {**RESUMED, "mup_base_hidden_size": 64}, False),
        ("ML-4705a", RESUMED, False),
        ("ML-7173", {**OVERRIDDEN, "mup_base_hidden_size": 32}, True),
        ("ML-7173", OVERRIDDEN, False),
        ("weight-norm-before-gather", {**WEIGHT_NORM, "use_layer_wise_distributed_optimizer": True}, True),
        ("weight-norm-before-gather", {**WEIGHT_NORM, "optimizer": "soap"}, False),
        ("inter-document-masking-with-cp", DOCUMENTS, True),
        ("inter-document-masking-with-cp", {**DOCUMENTS, "sft": True}, False),
        ("ML-4494", {**IN_BATCHES, "context_parallel_size": 2}, True),
        ("ML-4494", {**IN_BATCHES, "sequence_parallel": True}, True),
        ("ML-4494", IN_BATCHES, False),
        ("ML-4494", {**IN_BATCHES, "sequence_parallel": True, "defer_in_batch_packing_to_step": True}, False),
        ("ML-4494", {**ROLLOUTS, "context_parallel_size": 2}, True),
        ("ML-4494", {**ROLLOUTS, "context_parallel_size": 2, "rl_rollout_bank_max_bytes": None}, False),  # 0.19
        ("ML-4494", ROLLOUTS, False),
        ("ML-6099", EXPERTS, True),
        ("ML-6099", {**EXPERTS, "bf16": False}, False),
    ],
)
def test_a_run_and_one_just_outside(find_affecting, id, run, is_affected):
    assert (id in find_affecting(run)) is is_affected
