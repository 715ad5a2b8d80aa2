"""Runs of Muon and QK clipping that a defect affects, runs just outside, and those in which a patch leaves it."""

from types import SimpleNamespace

import pytest
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.doctor.findings import RunSettings

pytestmark = pytest.mark.forked("python")

HEADS = {"qk_clip": True, "mtp_num_layers": 1}
CLIPPED = {**HEADS, "bf16": True, "use_distributed_optimizer": True}
FSDP = {**HEADS, "use_megatron_fsdp": True}
GRAPHS = {"cuda_graph_impl": "transformer_engine"}
GATED = {"attention_output_gate": True, "optimizer": "muon", "num_attention_heads": 16, "num_query_groups": 2}
LAID_OUT = {"use_layer_wise_distributed_optimizer": True, "use_layer_wise_param_layout": True, "load": "x"}
BRIDGE = {"is_of_megatron_bridge": True}


def find(id, settings):
    (defect,) = (one for one in known_defects() if one.id == id)
    return defect, RunSettings([SimpleNamespace(**settings)], None)


@pytest.mark.parametrize(
    "id, settings, is_affected",
    [
        ("qk-clip-heads", {**FSDP, "megatron_fsdp_version": 2, "bf16": True}, True),
        ("qk-clip-heads", {**FSDP, "megatron_fsdp_version": 2}, False),
        ("qk-clip-heads", {**FSDP, "megatron_fsdp_version": 1, "bf16": True}, False),
        ("qk-clip-heads", FSDP, True),
        ("qk-clip-heads", {**CLIPPED, "experimental_attention_variant": "dsa"}, False),
        ("qk-clip-heads", {**CLIPPED, "hybrid_layer_pattern": "D-/*"}, False),
        ("qk-clip-negative-logits", {**FSDP, "megatron_fsdp_version": 2, "bf16": True}, False),
        ("layer-wise-layout-at-resume", LAID_OUT, True),
        ("layer-wise-layout-at-resume", {**LAID_OUT, "use_layer_wise_param_layout": False}, False),
        ("layer-wise-without-layout", LAID_OUT, True),
        ("layer-wise-without-layout", {**LAID_OUT, "use_layer_wise_param_layout": False}, False),
        ("layer-wise-without-layout", {**LAID_OUT, "no_load_optim": True}, False),
        ("layer-wise-without-layout", {**LAID_OUT, "use_layer_wise_distributed_optimizer": False}, False),
        ("ML-4646", {**FSDP, "megatron_fsdp_version": 2}, True),
        ("ML-4646", {**FSDP, "megatron_fsdp_version": 2, "bf16": True}, False),
    ],
)
def test_a_run_and_one_just_outside(id, settings, is_affected):
    defect, run = find(id, settings)
    assert bool(defect.affects(run)) is is_affected


@pytest.mark.parametrize(
    "id, settings, is_left",
    [
        ("qk-clip-heads", {**CLIPPED, "cuda_graph_impl": "local"}, True),
        ("qk-clip-heads", {**CLIPPED, **GRAPHS, "cuda_graph_modules": ["attn", "moe_router"]}, True),
        ("qk-clip-heads", {**CLIPPED, **GRAPHS, "cuda_graph_modules": ["moe_router"]}, False),
        ("qk-clip-heads", {**CLIPPED, "cuda_graph_impl": "none"}, False),
        ("qk-clip-heads", {**CLIPPED, **BRIDGE, "trains_adapters": True}, True),
        ("ML-4646", {**CLIPPED, **BRIDGE, "trains_adapters": False}, False),
        ("ML-4646", {**CLIPPED, "transformer_impl": "local"}, True),
        ("ML-4646", {**CLIPPED, "experimental_attention_variant": "dsa"}, True),
        ("ML-4646", CLIPPED, False),
        ("ML-gated-qkv", GATED, False),
        ("ML-gated-qkv", {**GATED, "is_of_ms_swift": True}, True),
        ("ML-gated-qkv", {**GATED, "tensor_model_parallel_size": 2}, False),
        ("ML-gated-qkv", {**GATED, "tensor_model_parallel_size": 4}, True),
        ("ML-gated-qkv", {**GATED, **BRIDGE, "freeze_vision_model": False}, True),
        ("ML-gated-qkv", {**GATED, **BRIDGE, "freeze_vision_model": True}, False),
    ],
)
def test_a_run_from_which_the_patch_does_not_remove_a_defect_and_one_from_which_it_does(id, settings, is_left):
    defect, run = find(id, settings)
    assert defect.affects(run) and bool(defect.unless.affects(run)) is is_left
