"""The MTP loss has the scale that mtp_grad_scale_func returns; without that function, the scale of the main loss."""

import dataclasses

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("scale-mtp-loss-separately")]

CPU = torch.device("cpu")


@pytest.fixture
def mtp_gradient():
    """mtp_gradient(microbatches, **config): the gradient of one unit of MTP loss after a forward step."""

    def run(microbatches=4, wrap_output=lambda scored: scored, is_last_stage=True, **settings):
        settings = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "mtp_num_layers": 1, **settings}
        main, mtp = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        scored = MTPLossAutoScaler.apply(main * 1.0, mtp)
        schedules.forward_step_calc_loss(
            model=None,
            output_tensor=wrap_output(scored),
            loss_func=lambda scores: (scores * 1.0, {}),
            config=TransformerConfig(**settings),
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=microbatches,
            forward_data_store=[],
            cp_group_size=1,
            is_last_stage=is_last_stage,
        )
        scored.sum().backward()
        return mtp.grad.item()

    yield run
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))


@pytest.mark.parametrize("per_token, expected", [(False, 0.25 / 4), (True, 0.25)])
@pytest.mark.parametrize("value", [0.25, torch.tensor(0.25), torch.tensor([0.25])])
def test_the_mtp_loss_takes_its_own_scale(mtp_gradient, per_token, expected, value):
    settings = {"mtp_grad_scale_func": lambda: value, "grad_scale_func": lambda loss: loss * 3.0}
    assert mtp_gradient(calculate_per_token_loss=per_token, **settings) == expected


def test_without_one_it_takes_the_scale_of_the_main_loss(mtp_gradient):
    assert mtp_gradient(grad_scale_func=lambda loss: loss * 3.0) == 3.0 / 4
    assert mtp_gradient() == 1.0 / 4


@pytest.mark.skipif(not hasattr(schedules, "get_tensor_device"), reason="stages hand over dictionaries from 0.18 on")
def test_a_stage_that_hands_over_a_dictionary_has_a_scale_too(mtp_gradient):
    gradient = mtp_gradient(
        wrap_output=lambda scored: {"hidden": scored}, is_last_stage=False, mtp_grad_scale_func=lambda: 0.5
    )
    assert gradient == 0.5 / 4


def test_without_mtp_heads_it_is_not_called(mtp_gradient):
    def fail():
        raise AssertionError("called")

    MTPLossAutoScaler.set_loss_scale(torch.tensor(7.0))
    assert mtp_gradient(mtp_num_layers=None, mtp_grad_scale_func=fail) == 7.0


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"mtp_grad_scale_func": lambda: 0.5, "grad_scale_func": lambda loss: loss * 2.0}, 0.5),
        ({"grad_scale_func": lambda loss: loss * 2.0}, 2.0),
        ({}, 1.0),
    ],
)
def test_get_mtp_loss_scale_prefers_the_mtp_function(settings, expected):
    scale = schedules._get_mtp_loss_scale(ModelParallelConfig(**settings), CPU)
    assert scale.numel() == 1 and scale.item() == expected and scale.device == CPU


@pytest.mark.parametrize("name", ["mtp_grad_scale_func", "grad_scale_func"])
def test_a_scale_for_each_token_is_refused(name):
    config = ModelParallelConfig(**{name: lambda *args: torch.ones(2)})
    with pytest.raises(ValueError, match=f"{name} must return a scalar"):
        schedules._get_mtp_loss_scale(config, CPU)


@pytest.mark.parametrize(
    "config_class", [ModelParallelConfig, TransformerConfig, MLATransformerConfig, HeterogeneousTransformerConfig]
)
def test_every_config_class_has_the_field(config_class):
    (field,) = (field for field in dataclasses.fields(config_class) if field.name == "mtp_grad_scale_func")
    assert field.default is None
