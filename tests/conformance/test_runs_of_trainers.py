"""Defects that depend on the trainer, or on the version of TransformerEngine, beside the settings of a run."""

from types import SimpleNamespace

import pytest
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.doctor.findings import RunSettings

from .test_runs_just_outside import AUX_LOSS, HEADS

pytestmark = pytest.mark.forked("python")


def test_packs_of_megatron_s_trainer_have_lengths_with_their_padding_alone():
    (defect,) = (one for one in known_defects() if one.id == "ML-4494")
    assert not defect.affects(RunSettings([SimpleNamespace(**HEADS, sft=True)], None))


@pytest.mark.parametrize("version, is_affected", [("2.17.1", True), ("2.18.0", False)])
def test_the_logits_that_are_compared_with_labels_depend_on_transformer_engine(version, is_affected):
    (defect,) = (one for one in known_defects() if one.id == "acceptance-after-loss")
    run = SimpleNamespace(**HEADS, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    assert bool(defect.affects(RunSettings([run], version))) is is_affected


def test_what_needs_a_padding_mask_is_not_met_in_trainers_that_give_none(find_affecting):
    run = {**AUX_LOSS, "moe_router_enable_expert_bias": True}
    run |= {"moe_z_loss_coeff": 0.1, "calculate_per_token_loss": True, "overlap_moe_expert_parallel_comm": True}
    run |= {"sequence_parallel": True, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    run |= {"mtp_num_layers": 1}
    others = ({"hybrid_layer_pattern": "M*E/*E"}, {"calculate_per_token_loss": False})
    others = (*others, {"overlap_moe_expert_parallel_comm": False})
    runs = [run, *({**run, **one} for one in (*others, {"moe_router_load_balancing_type": "quantile_balancing"}))]

    def find(**more):
        return set().union(*(find_affecting({**one, **more}, te="2.17.1") for one in runs))

    need_mask = {defect.id for defect in known_defects() if "gets a padding mask" in defect.only_if}
    assert need_mask <= find() and find() - find(yaml_cfg=None) == need_mask
    of_megatrons_loss = {"ML-3159", "ML-3396"}
    assert find() - find(is_of_megatron_bridge=True) == need_mask
    assert find() - find(is_of_verl=True) == need_mask | of_megatrons_loss
    assert need_mask <= find(is_of_verl=True, dynamic_context_parallel=True)
    assert find() - find(is_of_ms_swift=True) == {"ML-6114", "ML-5563", "hybrid-padding-mask"} | of_megatrons_loss
