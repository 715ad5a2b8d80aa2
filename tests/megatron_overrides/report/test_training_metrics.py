"""metrics() gives the numbers of the log line to a trainer that has another one."""

import megatron_mtp_patches
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

pytestmark = pytest.mark.forked("patched")


@pytest.fixture
def step():
    """step(gradient, **settings): an optimizer that has made one step with it; every second parameter is a head's."""

    def make(gradient, **settings):
        params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(2)]
        params[1].grad_norm_group = "mtp"
        config = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=1.0, **settings)
        optimizer = FP32Optimizer(torch.optim.AdamW(params, lr=0.1), config, lambda *args: None)
        for param in params:
            param.main_grad = torch.full(param.shape, gradient)
        optimizer.step()
        return optimizer

    return make


def test_each_optimizer_has_its_own(step):
    actor, critic = step(3.0, grad_norm_skip_threshold=1.0), step(1.0)
    assert megatron_mtp_patches.metrics(actor) == {
        "mtp grad norm": 6.0,
        "updates skipped for grad norm": 1.0,
        "mtp updates skipped for grad norm": 0.0,
    }
    assert megatron_mtp_patches.metrics() == megatron_mtp_patches.metrics(critic) == {"mtp grad norm": 2.0}


def test_the_heads_are_those_that_were_tracked_last(step):
    optimizer = step(1.0)
    MTPLossLoggingHelper.save_metrics_to_tracker(torch.tensor(4.0), torch.tensor(3), torch.tensor(4), 0, 1)
    assert "mtp_1 acceptance %" not in megatron_mtp_patches.metrics(optimizer)
    MTPLossLoggingHelper.track_mtp_metrics(1.0, 1, None)
    assert megatron_mtp_patches.metrics(optimizer)["mtp_1 acceptance %"] == 75.0
    MTPLossLoggingHelper.tracker.clear()


def test_before_a_step_there_are_none():
    assert megatron_mtp_patches.metrics() == {}


def test_what_is_no_optimizer_of_megatron_is_an_error(step):
    with pytest.raises(TypeError, match="AdamW is not a Megatron optimizer: pass what get_megatron_optimizer returned"):
        megatron_mtp_patches.metrics(step(1.0).optimizer)


def test_without_the_patches_there_are_none(step):
    optimizer = step(1.0)
    megatron_mtp_patches.revert()
    assert megatron_mtp_patches.metrics(optimizer) == {}
    megatron_mtp_patches.apply()
