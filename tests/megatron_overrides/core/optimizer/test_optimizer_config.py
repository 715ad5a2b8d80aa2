"""Settings that cannot work are refused before training."""

import dataclasses
import math

import pytest
from megatron.core.optimizer import OptimizerConfig


def test_the_default_is_to_skip_nothing():
    assert OptimizerConfig().grad_norm_skip_threshold == math.inf
    assert "grad_norm_skip_threshold" in {field.name for field in dataclasses.fields(OptimizerConfig)}


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, None, "5"])
def test_a_threshold_that_would_skip_every_update_is_refused(threshold):
    with pytest.raises(ValueError, match="--grad-norm-skip-threshold .* would skip every update or is no number"):
        OptimizerConfig(grad_norm_skip_threshold=threshold)


def test_a_threshold_and_an_optimizer_cuda_graph_are_refused_together():
    from megatron_overrides.core.optimizer.optimizer_config import check_skip_threshold

    class Settings:  # 0.16.1's OptimizerConfig has no optimizer_cuda_graph
        optimizer_cuda_graph = True
        grad_norm_skip_threshold = 5.0

    with pytest.raises(ValueError, match="--optimizer-cuda-graph"):
        check_skip_threshold(Settings)
    Settings.grad_norm_skip_threshold = math.inf
    check_skip_threshold(Settings)
    if "optimizer_cuda_graph" in {field.name for field in dataclasses.fields(OptimizerConfig)}:
        with pytest.raises(ValueError, match="--optimizer-cuda-graph"):
            OptimizerConfig(grad_norm_skip_threshold=5.0, optimizer_cuda_graph=True)
        OptimizerConfig(optimizer_cuda_graph=True)
