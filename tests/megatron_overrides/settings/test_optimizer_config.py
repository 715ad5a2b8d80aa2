"""Settings that cannot work are refused before training."""

import dataclasses
import math

import pytest
from megatron.core.optimizer import OptimizerConfig

pytestmark = pytest.mark.forked("patched")


def test_the_default_is_to_skip_nothing():
    assert OptimizerConfig().grad_norm_skip_threshold == math.inf
    assert "grad_norm_skip_threshold" in {field.name for field in dataclasses.fields(OptimizerConfig)}


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, None, "5"])
def test_a_threshold_that_would_skip_every_update_is_refused(threshold):
    with pytest.raises(ValueError, match="--grad-norm-skip-threshold .* would skip every update or is not a number"):
        OptimizerConfig(grad_norm_skip_threshold=threshold)


def test_a_threshold_and_an_optimizer_cuda_graph_are_refused_together():
    from megatron_overrides.norms.checks import check_threshold

    class Settings:  # 0.16.1's OptimizerConfig has no optimizer_cuda_graph
        optimizer_cuda_graph = True
        grad_norm_skip_threshold = 5.0

    with pytest.raises(ValueError, match="--optimizer-cuda-graph"):
        check_threshold(Settings)
    Settings.grad_norm_skip_threshold = math.inf
    check_threshold(Settings)
    if "optimizer_cuda_graph" in {field.name for field in dataclasses.fields(OptimizerConfig)}:
        with pytest.raises(ValueError, match="--optimizer-cuda-graph"):
            OptimizerConfig(grad_norm_skip_threshold=5.0, optimizer_cuda_graph=True)
        OptimizerConfig(optimizer_cuda_graph=True)


def test_the_heads_have_no_limits_of_their_own_by_default():
    assert OptimizerConfig().mtp_clip_grad is None and OptimizerConfig().mtp_grad_norm_skip_threshold is None
    OptimizerConfig(mtp_clip_grad=0.0, mtp_grad_norm_skip_threshold=math.inf)


@pytest.mark.parametrize("limit", [-1.0, math.nan, "5"])
def test_a_limit_that_is_no_norm_is_refused(limit):
    with pytest.raises(ValueError, match="--mtp-clip-grad .* is not a norm to clip to"):
        OptimizerConfig(mtp_clip_grad=limit)
    with pytest.raises(ValueError, match="--mtp-grad-norm-skip-threshold .* every update or is not a number"):
        OptimizerConfig(mtp_grad_norm_skip_threshold=limit)
