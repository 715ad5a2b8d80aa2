"""Routers in heads of a hybrid model record their auxiliary loss in the slot of their head, and train with it once."""

import importlib
import inspect

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

BLOCK = inspect.signature(MultiTokenPredictionBlock.__init__).parameters
pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("average-aux-loss-over-moe-layers"),
    pytest.mark.skipif("mtp_layer_pattern" not in BLOCK, reason="0.16 has no heads of hybrid models"),
]
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01, "add_bias_linear": False}
NAME = "load_balancing_loss"


@pytest.fixture
def make_hybrid(make_model):
    """make_hybrid(pattern, **settings): a GPT whose heads have the layers of this pattern, as in a hybrid model."""

    def make(pattern, **settings):
        model = make_model(**EXPERTS, **settings)
        experts = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
        if "hybrid_submodules" in BLOCK:
            name, module = "hybrid_submodules", "megatron.core.models.hybrid.hybrid_block:HybridStackSubmodules"
        else:
            name, module = "mamba_submodules", "megatron.core.ssm.mamba_block:MambaStackSubmodules"
        path, _, submodules = module.partition(":")
        layers = getattr(importlib.import_module(path), submodules)(
            mlp_layer=get_gpt_layer_local_spec(), moe_layer=experts
        )
        model.mtp = MultiTokenPredictionBlock(
            model.config,
            get_gpt_mtp_block_spec(model.config, experts, use_transformer_engine=False),
            mtp_layer_pattern=pattern,
            mtp_num_depths=2,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            **{name: layers},
        )
        return model

    return make


@pytest.fixture
def losses(batch):
    """losses(model): the auxiliary losses that a forward pass leaves in each slot."""

    def collect(model):
        try:
            logging = importlib.import_module("megatron.core.transformer.moe.moe_logging")
        except ModuleNotFoundError:
            tracker = importlib.import_module(
                "megatron.core.transformer.moe.moe_utils"
            ).get_moe_layer_wise_logging_tracker()
            tracker.clear()
            model(**batch)
            return tracker[NAME]["values"].tolist()
        logging.destroy_moe_metrics_tracker()
        model(**batch)
        return logging.get_moe_metrics_tracker().metrics[NAME].values.tolist()

    return collect


@pytest.mark.parametrize("pattern", ["E", "-E", "--E", "E-"])
def test_each_head_has_a_slot(make_hybrid, losses, pattern):
    actual = losses(make_hybrid(pattern))
    assert len(actual) == 4
    assert all(0.9 < loss < 1.2 for loss in actual)


def test_layers_of_one_head_share_its_slot(make_hybrid, losses):
    actual = losses(make_hybrid("EE"))
    assert all(0.9 < loss < 1.2 for loss in actual[:2]) and all(1.8 < loss < 2.4 for loss in actual[2:])


def test_a_repeated_head_counts_once(make_hybrid, losses):
    actual = losses(make_hybrid("--E", mtp_use_repeated_layer=True))
    assert all(0.9 < loss < 1.2 for loss in actual[:3])
    assert actual[3] == 0.0


def test_a_repeated_head_trains_with_its_auxiliary_loss_once(make_hybrid, batch, gradients):
    """With half the coefficient, the router of a head that is not divided would get the same gradient."""
    routers = {}
    for share in (0.0, 0.5, 1.0):
        model = make_hybrid("-E", mtp_use_repeated_layer=True)
        for module in model.modules():
            if isinstance(module, Router):
                module.is_mtp_layer = module.is_mtp_layer and share == 1.0
        model.config.moe_aux_loss_coeff = 0.01 * share
        actual = gradients(model, model(**batch), weight=0.0)
        routers[share] = next(grad for name, grad in actual.items() if "mtp" in name and "router.weight" in name)
    assert not torch.equal(routers[0.0], routers[1.0])
    torch.testing.assert_close(routers[1.0], routers[0.5], rtol=1e-5, atol=1e-9)


def test_routers_of_the_main_model_and_of_a_gpt_are_left_alone(make_hybrid, make_model):
    main = [m for m in make_hybrid("-E").decoder.modules() if isinstance(m, Router)]
    assert [(router.is_mtp_layer, router.layer_number) for router in main] == [(False, 1), (False, 2)]
    gpt = [m for m in make_model(**EXPERTS).mtp.modules() if isinstance(m, Router)]
    assert [(router.is_mtp_layer, router.layer_number) for router in gpt] == [(True, 1), (True, 2)]
