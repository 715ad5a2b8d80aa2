"""Parameter groups are in the same order, whichever parameters a rank meets first."""

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("order-param-groups-alike")]


@pytest.fixture
def order():
    """order(*names): the groups of parameters that a rank meets in this order: [(lr_mult, whether of experts)]."""

    def run(*names):
        import torch
        from megatron.core import optimizer

        model = torch.nn.Module()
        for name in names:
            param = torch.nn.Parameter(torch.ones(2, 2))
            param.allreduce = "expert" not in name
            setattr(model, name, param)
        settings = {optimizer.ParamKey(name="slow*"): {"max_lr": 1e-3}}
        groups = optimizer._get_param_groups([model], optimizer.OptimizerConfig(lr=1e-2), settings)
        return [(group["max_lr"], group["is_expert_parallel"]) for group in groups]

    return run


@pytest.mark.parametrize(
    "names", [("dense", "expert", "slow", "slow_expert"), ("slow_expert", "slow", "expert", "dense")]
)
def test_dense_parameters_come_first_among_those_with_the_same_settings(order, names):
    assert order(*names) == [(1e-2, False), (1e-2, True), (1e-3, False), (1e-3, True)]
