"""Which settings belong to features that a run does not use, and that the features are asked by names Megatron has."""

import argparse
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.doctor.findings import RunSettings
from megatron_mtp_patches.parity.upgrade.features import FEATURES, find_unused
from megatron_mtp_patches.parity.upgrade.reading import _describe_settings

pytestmark = pytest.mark.forked("patched")
arguments = pytest.importorskip("megatron.training.arguments", reason="the 0.16.1 wheel has no megatron.training")
ADAM = {"optimizer": "adam"}


@pytest.mark.parametrize(
    "setting, without, uses",
    [
        ("inference_dynamic_batching_block_size", {}, {"perform_rl_step": True}),
        ("rl_generation_lag", {}, {"perform_rl_step": True}),
        ("logits_load_prefetch_factor", {}, {"logits_load_dir": "teacher"}),
        ("tokenizer_hf_use_fast", {"tokenizer_type": "SFTTokenizer"}, {"tokenizer_type": "HuggingFaceTokenizer"}),
        ("muon_momentum", ADAM, {"optimizer": "dist_muon"}),
        ("adaptive_muon_eps", {"optimizer": "muon"}, {"optimizer": "adaptive_muon"}),
        ("use_layer_wise_param_layout", ADAM, {"use_layer_wise_distributed_optimizer": True}),
        ("moe_aux_loss_coeff", {}, {"num_experts": 8}),
        ("moe_deepep_num_sms", {"num_experts": 8}, {"num_experts": 8, "moe_token_dispatcher_type": "flex"}),
        ("moe_paged_stash_page_size", {"num_experts": 8}, {"num_experts": 8, "moe_paged_stash": True}),
        ("dsa_indexer_topk", {}, {"hybrid_layer_pattern": "MD"}),
        ("cuda_graph_scope", {"cuda_graph_impl": "none"}, {"cuda_graph_impl": "local"}),
        ("data_parallel_sharding_strategy", {"use_megatron_fsdp": False}, {"use_megatron_fsdp": True}),
        ("tensor_parallel_num_weight_shards", {"gtp_weight_remat_size": 1}, {"gtp_weight_remat_size": 2}),
        ("stream_ckpt_dequant", {}, {"fp8": "hybrid"}),
    ],
)
def test_a_setting_is_unused_without_its_feature(setting, without, uses):
    names = [setting, "lr", "inference_rng_tracker"]  # which initialize_megatron() reads in each training
    assert list(find_unused(names, RunSettings([SimpleNamespace(**without)], None))) == [setting]
    assert not list(find_unused(names, RunSettings([SimpleNamespace(**uses)], None)))


class Asked:
    """A run that remembers which settings it was asked for."""

    def __init__(self):
        self.names = set()

    def __getattr__(self, name):
        self.names.add(name)


def test_features_are_known_by_settings_of_megatron():
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    settings = _describe_settings([parser.parse_args([])])
    of_0_18 = {"use_layer_wise_distributed_optimizer"}  # validate_args sets it
    for starts, uses in FEATURES.items():
        if any(name.startswith(starts) for name in settings):
            run = Asked()
            uses(run)
            assert run.names <= settings.keys() | of_0_18, starts
