"""Gradients are scaled by no less than the floor under the clip coefficient."""

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("floor-clip-coefficient")]


@pytest.mark.parametrize(
    "limit, norm, factor",
    [(1.0, 50.0, 0.02), (1.0, 1000.0, 0.01), (1.0, 1e8, 0.01), (1.0, 0.5, 1.0), (1e-7, 1.0, 0.01)],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_gradients_are_scaled_by_no_less_than_the_floor(monkeypatch, limit, norm, factor, as_tensor):
    from megatron.core.optimizer import optimizer as upstream

    from megatron_overrides.norms.clipping import scale_to_limit

    taken = []
    monkeypatch.setattr(
        upstream,
        "clip_grad_by_total_norm_fp32",
        lambda params, max_norm, total_norm, **_: taken.append(min(1.0, float(max_norm / (total_norm + 1e-6)))),
    )
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    config = OptimizerConfig(min_clip_coefficient=0.01)
    scale_to_limit([param], limit, torch.tensor([norm]) if as_tensor else norm, config)
    assert taken == [pytest.approx(factor, rel=1e-6)]


@pytest.mark.parametrize("bad", [0.0, 1.0, -0.1, float("nan"), "0.1"])
def test_a_floor_that_is_no_factor_is_refused(bad):
    with pytest.raises(ValueError, match="--min-clip-coefficient .* between 0 and 1"):
        OptimizerConfig(min_clip_coefficient=bad)


def test_a_floor_without_clipping_is_refused():
    with pytest.raises(ValueError, match="--min-clip-coefficient .* set clip_grad"):
        OptimizerConfig(min_clip_coefficient=0.1, clip_grad=0.0)
    OptimizerConfig(min_clip_coefficient=0.1, clip_grad=0.0, mtp_clip_grad=1.0)
    OptimizerConfig(min_clip_coefficient=0.1, clip_grad=0.0, grad_norm_group=["router=router:1.0"])
