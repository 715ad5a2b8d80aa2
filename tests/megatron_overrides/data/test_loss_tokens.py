"""Trainers with less than Megatron's own: no process groups, or the configuration of parallelism alone."""

import pytest
import torch
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer import TransformerConfig

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-loss-tokens-over-cp")]


def test_without_process_groups_the_tokens_of_this_rank_count(monkeypatch):
    monkeypatch.setattr(parallel_state, "_CONTEXT_PARALLEL_GROUP", None)
    loss, _ = forward_step_calc_loss(
        None,
        torch.tensor(12.0),
        lambda output: (output, torch.tensor(4), {}),
        TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
        None,
        False,
        2,
        [],
        cp_group_size=4,
        is_last_stage=True,
    )
    assert float(loss) == 12 / 4 / 2  # the sum / tokens / microbatches


def test_a_mean_needs_no_setting_of_tokens():
    """As upstream's tests of the schedules call it: a ModelParallelConfig has no calculate_per_token_loss."""
    config, reported = ModelParallelConfig(), []
    loss, _ = forward_step_calc_loss(
        None,
        torch.tensor(12.0),
        lambda output: (output, {"loss": 12}),
        config,
        None,
        False,
        2,
        reported,
        cp_group_size=4,
        is_last_stage=True,
    )
    assert (float(loss), reported) == (12 * 4 / 2, [{"loss": 12}])  # each context-parallel rank has its own mean
