"""Heads that stay in the model and do not train: what they keep, what they cost, and what is refused."""

import copy
import importlib

import pytest
import torch
from head_training import LENGTH, VOCABULARY, HeadTraining
from megatron.core.transformer import TransformerConfig
from megatron_mtp_patches import metrics, mtp_pass

pytestmark = pytest.mark.forked("patched")

DISABLED = {"disable_mtp_loss": True}
WITHOUT_HEADS = {"mtp_num_layers": None}
ROUTED = {"num_moe_experts": 4, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
ROUTED |= {"moe_aux_loss_coeff": 0.01, "add_bias_linear": False}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STEPS = 5


@pytest.fixture
def train(make_gpt):
    """train(**config): a HeadTraining after some steps in which the heads did not change."""

    def run(like=None, optimizer=(), **config):
        model = make_gpt(VOCABULARY, LENGTH, **config)
        if like is not None:
            model.load_state_dict(like, strict=False)
        training = HeadTraining([model], clip_grad=0.1, **dict(optimizer))
        heads = copy.deepcopy(training.heads())
        for number in range(STEPS):
            training.step(number)
        assert all(torch.equal(tensor, heads[name]) for name, tensor in training.heads().items())
        return training

    return run


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model", [{}, ROUTED, RECOMPUTED], ids=["dense", "experts", "recomputed"])
def test_the_main_model_trains_as_one_without_heads(make_gpt, train, model, tied):
    start = copy.deepcopy(make_gpt(VOCABULARY, LENGTH, tied=tied, **model).state_dict())
    alone = train(start, tied=tied, **model, **WITHOUT_HEADS)
    disabled = train(start, tied=tied, **model, **DISABLED)
    assert not disabled.losses and disabled.norms == alone.norms and min(alone.norms) > 0.1
    right = alone.main_model()
    assert all(torch.equal(tensor, right[name]) for name, tensor in disabled.main_model().items())
