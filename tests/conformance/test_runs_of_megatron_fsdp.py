"""Runs of Megatron-FSDP that a defect affects, and runs that differ from them by a setting and cannot meet it."""

from types import SimpleNamespace

import pytest
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.doctor.findings import RunSettings

pytestmark = pytest.mark.forked("python")

FSDP = {"use_megatron_fsdp": True, "bf16": True}
REPLICAS = {**FSDP, "data_parallel_sharding_strategy": "no_shard", "clip_grad": 1.0}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
SHARDED = {**FSDP, "data_parallel_sharding_strategy": "optim_grads_params"}
EXPERTS = {"num_experts": 4, "world_size": 4}
FEW_EXPERTS = {**EXPERTS, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
INSTANCES = {"num_distributed_optimizer_instances": 2}
OUTER = {**SHARDED, **INSTANCES, "outer_dp_sharding_strategy": "optim"}
OF_BRIDGE = {"is_of_megatron_bridge": True}
PRECISION_AWARE = {**FSDP, "use_precision_aware_optimizer": True}
ZEROS = {**PRECISION_AWARE, "log_num_zeros_in_grad": True}
MICROBATCHES = {"global_batch_size": 8, "micro_batch_size": 1}
UNSHARDED = {**FSDP, **MICROBATCHES, "data_parallel_sharding_strategy": "optim"}
SINGLE = {**SHARDED, **MICROBATCHES, **EXPERTS, "expert_model_parallel_size": 4, "gradient_accumulation_fusion": False}
OLD = {**SHARDED, "gradient_accumulation_fusion": True, "grad_reduce_in_bf16": True}
IN_FP16 = {**OLD, "bf16": False, "fp16": True, "grad_reduce_in_bf16": False}
MAMBA = {**SHARDED, "hybrid_layer_pattern": "M*M-"}


@pytest.mark.parametrize(
    "id, affected, more",
    [
        ("ML-3754a", {**REPLICAS, **OVERLAPPED}, {"clip_grad": 0.0}),
        ("ML-3754a", {**REPLICAS, **OVERLAPPED}, {"use_distributed_optimizer": False}),
        ("ML-3754a", {**REPLICAS, **OVERLAPPED, "world_size": 2}, {"world_size": 1}),
        ("ML-3754b", {**REPLICAS, "overlap_param_gather": True}, {"world_size": 1}),
        ("ML-3754c", REPLICAS, {"use_distributed_optimizer": False}),
        ("fsdp-counts-experts-twice", {**REPLICAS, **FEW_EXPERTS}, {"clip_grad": 0.0}),
        ("fsdp-counts-experts-twice", {**REPLICAS, **FEW_EXPERTS}, {"expert_model_parallel_size": 2}),
        ("fsdp-norm-without-other-experts", {**REPLICAS, **EXPERTS, "expert_model_parallel_size": 2}, {"clip_grad": 0}),
        (
            "ML-5879",
            {**FSDP, "log_num_zeros_in_grad": True, "tensor_model_parallel_size": 2},
            {"megatron_fsdp_version": 2},
        ),
        ("ML-4891", OUTER, {"clip_grad": 0.0}),
        ("ML-4891", OUTER, {"data_parallel_sharding_strategy": "optim_grads"}),
        ("fsdp-instances-sum-gradients", OUTER, {"data_parallel_sharding_strategy": "no_shard"}),
        ("ML-4891b", {**SHARDED, **INSTANCES}, OF_BRIDGE),
        ("ML-4891b", {**UNSHARDED, **INSTANCES, **OF_BRIDGE}, {"overlap_grad_reduce": True}),
        ("ML-4133", {**PRECISION_AWARE, "fp8_recipe": "delayed"}, {"fp8_recipe": "tensorwise"}),
        (
            "ML-4133",
            {**PRECISION_AWARE, "fp8_recipe": "mxfp8", "main_params_dtype": "fp16"},
            {"main_params_dtype": "fp32"},
        ),
        ("ML-4802", ZEROS, {"tensor_model_parallel_size": 2}),
        ("ML-4802", ZEROS, {"num_experts": 4}),
        ("ML-4802", ZEROS, INSTANCES),
        ("ML-4802", ZEROS, {"fp8_recipe": "tensorwise"}),
        ("ML-4802b", {**ZEROS, "num_experts": 4}, {"num_experts": None}),
        ("ML-4802b", {**ZEROS, "tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 1}),
        ("ML-4802b", {**ZEROS, **INSTANCES}, {"log_num_zeros_in_grad": False}),
        ("ML-4802b", {**ZEROS, **INSTANCES}, {"use_precision_aware_optimizer": False}),
        ("ML-4054b", {**SHARDED, "fsdp_double_buffer": True}, {"fsdp_double_buffer": False}),
        ("ML-6357a", UNSHARDED, {"transformer_impl": "local"}),
        ("fsdp-gradients-of-single-replicas", SINGLE, {"calculate_per_token_loss": True}),
        ("fsdp-gradients-of-single-replicas", SINGLE, {"ddp_average_in_collective": True}),
        ("fsdp-gradients-of-single-replicas", SINGLE, {"expert_model_parallel_size": 2}),
        ("ML-4717", MAMBA, {"hybrid_layer_pattern": "*-*-"}),
        ("ML-4717", {**SHARDED, "is_hybrid_model": True}, {"is_hybrid_model": False}),
    ],
)
def test_one_setting_takes_a_run_of_megatron_fsdp_out(id, affected, more):
    assert is_affected(id, affected, "2.16.1")
    assert not is_affected(id, {**affected, **more}, "2.16.1")


@pytest.mark.parametrize(
    "affected, more",
    [
        (OLD, {"grad_reduce_in_bf16": False}),
        ({**OLD, "grad_reduce_in_bf16": None, "grad_reduce_in_fp32": False}, {"grad_reduce_in_fp32": True}),
        (IN_FP16, {"accumulate_allreduce_grads_in_fp32": True}),
    ],
)
def test_an_old_megatron_fuses_gradients_of_the_type_of_the_weights_alone(affected, more):
    assert is_affected("ML-2904", affected, "2.9.0")
    assert not is_affected("ML-2904", {**affected, **more}, "2.9.0")


def is_affected(id, settings, transformer_engine):
    (defect,) = (one for one in known_defects() if one.id == id)
    return bool(defect.affects(RunSettings([SimpleNamespace(**settings)], transformer_engine)))
