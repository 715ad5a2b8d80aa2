"""Updates of the MTP heads that are dropped leave an optimizer state that saves and goes on."""

import pytest
import torch

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("clip-mtp-grads-separately")]


@pytest.mark.parametrize("kind", ["fp32", "float16"])
def test_an_optimizer_of_heads_alone_goes_on_after_its_first_update_was_dropped(make_optimizer, kind):
    optimizer, params = make_optimizer(kind, heads=True, mtp_grad_norm_skip_threshold=10.0)
    for param in optimizer.get_parameters():
        param.grad_norm_group = "mtp"

    def init_state(adam, config=None):  # as get_megatron_optimizer's
        for param in optimizer.get_parameters():
            if not adam.state[param]:
                adam.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))

    optimizer.init_state_fn = init_state
    before = [param.detach().clone() for param in params]
    for scale, moved in ((100.0, False), (0.1, True)):
        for param in params:
            param.main_grad = torch.full(param.shape, scale)
        assert optimizer.step()[0] is True
        assert [not torch.equal(old, new) for old, new in zip(before, params, strict=True)] == [moved] * len(params)
    assert [int(optimizer.optimizer.state[param]["step"]) for param in optimizer.get_parameters()] == [2] * len(params)


@pytest.mark.parametrize("kind", ["fp32", "float16", "distributed"])
@pytest.mark.parametrize("scales", [[100.0, 100.0, 1.0], [1.0, 100.0, 1.0]])
def test_the_state_of_dropped_heads_keeps_in_step(make_optimizer, kind, scales):
    """From the first step on, or later: there for each parameter, with one count for all, as in fused optimizers."""
    optimizer, params = make_optimizer(kind, heads=True, clip_grad=1.0, mtp_grad_norm_skip_threshold=10.0)

    def init_state(adam, config=None):  # as get_megatron_optimizer's
        for group in adam.param_groups:
            for param in group["params"]:
                if not adam.state[param]:
                    adam.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))

    if kind != "distributed":
        optimizer.init_state_fn = init_state
    for number, scale in enumerate(scales, start=1):
        optimizer.zero_grad()
        for index, param in enumerate(params):
            grad = torch.full(param.shape, scale if index % 2 else 0.1)
            if hasattr(param, "main_grad"):
                param.main_grad.copy_(grad)
            else:
                param.main_grad = grad
        assert optimizer.step()[0] is True
        states = [optimizer.optimizer.state[param] for param in optimizer.get_parameters()]
        groups = optimizer.optimizer.param_groups  # where FusedAdam keeps its count
        assert {int(one["step"]) for one in (*states, *groups) if "step" in one} == {number}
        assert all({"exp_avg", "exp_avg_sq"} <= set(state) for state in states)
