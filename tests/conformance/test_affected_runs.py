"""Which runs meet the defects that depend on more than one setting."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.forked("python")

MOE = {"num_experts": 4, "num_layers": 4, "moe_layer_freq": 1, "moe_z_loss_coeff": 1e-3}
MOE |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
REPEATED = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
HYBRID = {**MOE, "mtp_num_layers": 2, "hybrid_layer_pattern": "M*ME/ME/ME"}
MEAN, TWICE, INDEX = "divided by more than", "once for each pass", "IndexError"


@pytest.fixture
def find(find_affecting):
    """find(patch, release, run): the effects of the defects that the patch removes from such a run of this release."""
    from megatron_mtp_patches.defects.catalog import releases_with

    def search(patch, release, run):
        removed = [defect for defect in find_affecting(run).values() if defect.patch == patch]
        return [defect.effect for defect in removed if release in releases_with(defect)]

    return search


@pytest.mark.parametrize(
    "release, run, expected",
    [
        ("0.16.1", {**MOE, "mtp_num_layers": 2}, []),
        ("0.16.1", {**MOE, "moe_layer_freq": 2, "mtp_num_layers": 2}, [MEAN]),
        ("0.16.1", {**MOE, "moe_layer_freq": 3, "mtp_num_layers": 2}, []),
        ("0.16.1", {**MOE, "moe_layer_freq": [1, 1, 1, 0], "mtp_num_layers": 2}, [MEAN]),
        ("0.16.1", {**MOE, "moe_layer_freq": "([1]*3+[0]*1)", "mtp_num_layers": 2}, [MEAN]),
        ("0.16.1", {**MOE, "moe_layer_freq": "([0]*1+[1]*3)", "mtp_num_layers": 2}, []),
        ("0.16.1", {**MOE, "moe_layer_freq": (1, 1, 1, 0), "mtp_num_layers": 2}, [MEAN]),
        ("0.16.1", {**MOE, "moe_layer_freq": "2", "mtp_num_layers": 2}, [MEAN]),
        ("0.16.1", {"num_experts": 4, "mtp_num_layers": 2, "moe_layer_freq": 2}, []),
        ("0.19.2", {**MOE, **REPEATED}, [MEAN]),
        ("0.19.2", {**MOE, **REPEATED, "mtp_num_layers": 1}, []),
        ("0.19.2", {**MOE, **REPEATED, "num_experts": None}, []),
        ("0.19.2", HYBRID, [MEAN]),
        ("0.19.2", {**HYBRID, **REPEATED}, [TWICE, MEAN]),
        ("0.19.2", {**HYBRID, **REPEATED, "hybrid_layer_pattern": "M*ME/MM/MM"}, [MEAN]),
        ("main", {**HYBRID, **REPEATED}, []),
        ("0.19.2", {**HYBRID, "mtp_num_layers": None, "mtp_use_repeated_layer": True}, []),
        ("main", {**HYBRID, "hybrid_layer_pattern": "M*ME/ME", "mtp_num_layers": 1}, [INDEX]),
        ("main", {**HYBRID, "hybrid_layer_pattern": "M*ME/E-/E-"}, []),
    ],
)
def test_auxiliary_losses(find, release, run, expected):
    texts = find("average-aux-loss-over-moe-layers", release, run)
    assert len(texts) == len(expected)
    assert all(part in text for part, text in zip(expected, texts, strict=True))


CUT = {"mtp_num_layers": 1, "context_parallel_size": 2, "sft": False}
PER_TOKEN = {**CUT, "calculate_per_token_loss": True}


@pytest.mark.parametrize(
    "run, expected",
    [
        (CUT, {"ML-7513c"}),
        ({**CUT, "eod_mask_loss": True}, {"ML-7513b"}),
        ({**CUT, "sft": None}, {"ML-7513b"}),  # another trainer
        ({**CUT, "dataloader_inter_document_masking": True}, {"ML-7513b"}),
        ({**CUT, "context_parallel_size": 1, "sft": True}, set()),
        ({**PER_TOKEN, "sft": True, "data_parallel_size": 2}, {"ML-7498", "ML-7452c"}),
        ({**PER_TOKEN, "data_parallel_size": 2}, {"ML-7498b"}),
        ({**PER_TOKEN, "dataloader_inter_document_masking": True, "data_parallel_size": 2}, {"ML-7498", "ML-7452c"}),
        (
            {**PER_TOKEN, "context_parallel_size": 1, "sft": True, "global_batch_size": 4, "micro_batch_size": 2},
            {"ML-7452c"},
        ),
        ({**PER_TOKEN, "context_parallel_size": 1, "sft": True}, set()),
        ({**PER_TOKEN, "mtp_num_layers": None, "sft": True, "data_parallel_size": 2}, set()),
    ],
)
def test_counts_of_the_tokens_of_heads(find_affecting, run, expected):
    assert find_affecting(run).keys() & {"ML-7452c", "ML-7498", "ML-7498b", "ML-7513b", "ML-7513c"} == expected


REPLAYED = {**MOE, "mtp_num_layers": 1, "moe_enable_routing_replay": True}


@pytest.mark.parametrize(
    "run, is_met",
    [
        (REPLAYED, True),
        ({**REPLAYED, "mtp_num_layers": None}, False),
        ({**REPLAYED, "num_experts": None}, False),
        ({**REPLAYED, "moe_enable_routing_replay": False}, False),
        ({**REPLAYED, "moe_layer_freq": [1, 1, 1, 0]}, False),
        ({**REPLAYED, "hybrid_layer_pattern": "M*ME/ME"}, True),
        ({**REPLAYED, "hybrid_layer_pattern": "M*ME/M-"}, False),
    ],
)
def test_replayed_routes(find, run, is_met):
    assert len(find("leave-heads-out-of-router-replay", "0.18.2", run)) == is_met


@pytest.mark.parametrize("optimizer, is_met", [("muon", True), ("dist_muon", True), ("adam", False)])
@pytest.mark.parametrize(
    "settings, may_be_met",
    [({}, False), ({"attention_output_gate": True}, True)]
    + [({"attention_output_gate": True, "muon_split_qkv": splits}, splits) for splits in (False, True)],
)
def test_gated_attention(find, optimizer, is_met, settings, may_be_met):
    affected = find("split-gated-qkv-for-muon", "0.18.2", {"optimizer": optimizer, **settings})
    assert len(affected) == (is_met and may_be_met)


SPLIT = {"num_experts": 8, "tensor_model_parallel_size": 2, "moe_grouped_gemm": True}
EXPERTS, BIASES, DIST_MUON = "leaves out the experts", "leaves out the biases", "of layer-wise optimizers leaves out"


@pytest.mark.parametrize(
    "release, run, expected",
    [
        ("0.18.2", SPLIT, [EXPERTS]),
        ("0.18.2", {**SPLIT, "transformer_impl": "local"}, []),
        ("0.16.1", {**SPLIT, "moe_use_legacy_grouped_gemm": True}, []),
        ("0.18.2", {**SPLIT, "moe_grouped_gemm": False, "add_bias_linear": True}, []),  # Megatron refuses it
        (
            "0.18.2",
            {**SPLIT, "moe_grouped_gemm": False, "add_bias_linear": True, "expert_tensor_parallel_size": 1,
             "expert_model_parallel_size": 2},
            [BIASES],
        ),
        (
            "0.19.2",
            {**SPLIT, "add_bias_linear": True, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2,
             "bf16": True, "optimizer": "muon", "use_layer_wise_distributed_optimizer": True},
            [DIST_MUON],
        ),
        (
            "0.19.2",
            {**SPLIT, "add_bias_linear": True, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2,
             "bf16": True, "optimizer": "dist_muon"},
            [DIST_MUON],
        ),
    ],
)  # fmt: skip
def test_experts(find, release, run, expected):
    texts = find("count-experts-in-grad-norm", release, run)
    assert len(texts) == len(expected)
    assert all(part in text for part, text in zip(expected, texts, strict=True))


@pytest.mark.parametrize("method, is_met", [("uniform", True), ("block", False), (None, True)])
@pytest.mark.parametrize("more", [{"fp8": "hybrid"}, {"sft": True}])
def test_heads_are_recomputed_by_one_method_only(find, method, is_met, more):
    run = {"mtp_num_layers": 1, "recompute_granularity": "full", "recompute_method": method, **more}
    assert bool(find("recompute-quantized-mtp-heads", "0.17.1", run)) is is_met


MTP_LAYER = SimpleNamespace(name="mtp")  # as Megatron's LayerType.mtp


@pytest.mark.parametrize("settings", [{"save": "x"}, {"overlap_grad_reduce": True}])
@pytest.mark.parametrize(
    "layout, is_met",
    [
        (None, True),
        ("Et|tm|L", False),
        ("Et|t|mL", True),
        ("Et|t|m*2,L", True),
        ("Ett|(tt|)*2,m|L", False),
        ("Et|(t|)*3tmL", True),
        ("Et|t|t|m|t|L", False),  # three ranks, interleaved
        ([["embedding", "decoder"], ["decoder", "mtp"], ["loss"]], False),
        ([["embedding", "decoder"], [" MTP", "loss"]], True),
        ([["embedding", "decoder"], [MTP_LAYER, "loss"]], True),
        (SimpleNamespace(input_data="Et|tm|L"), False),
        (SimpleNamespace(input_data="Et|tmL"), True),
    ],
)
def test_an_output_weight_is_unused_only_where_the_heads_are_on_the_last_stage(find, settings, layout, is_met):
    run = {"mtp_num_layers": 1, "pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": layout}
    assert bool(find("drop-unused-output-weight", "0.18.2", {**run, **settings})) is is_met
