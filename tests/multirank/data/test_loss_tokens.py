"""Without per-token loss the main loss of a microbatch is a mean over the tokens of all context-parallel ranks."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer import TransformerConfig

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-loss-tokens-over-cp"), pytest.mark.ranks(2, 4)]


@pytest.fixture
def divide(count_collectives):
    """divide(tokens, loss function's outputs, ...): (the loss that is trained, from a sum of 12; the all-reduces)."""

    def run(tokens, outputs=3, model=None, microbatches=2, **settings):
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, **settings)
        count_collectives.clear()
        loss, _ = forward_step_calc_loss(
            model,
            torch.tensor(12.0),
            lambda output: (output, torch.tensor(tokens, dtype=torch.int), {})[:: 1 if outputs == 3 else 2],
            config,
            None,
            False,
            microbatches,
            [],
            cp_group_size=parallel_state.get_context_parallel_world_size(),
            is_last_stage=True,
        )
        return float(loss), count_collectives.count("all_reduce")

    return run


def test_the_tokens_of_all_context_parallel_ranks_count(parallel, divide):
    parallel(context_parallel_size=2)
    has_tokens = parallel_state.get_context_parallel_rank() == 0
    loss, all_reduces = divide(6 if has_tokens else 0)
    assert (loss, all_reduces) == (12 * 2 / 6 / 2, 1)  # the sum x CP / all tokens / microbatches


def test_the_tokens_are_counted_where_the_loss_is(parallel, monkeypatch):
    """A loss function may return them on the host, where NCCL reduces nothing."""
    parallel(context_parallel_size=2)
    devices = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, **_: devices.append(tensor.device.type))
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    loss = torch.tensor(12.0, device="meta")
    forward_step_calc_loss(
        None, loss, lambda output: [output, torch.tensor(6), {}], config, None, False, 1, [], 2, is_last_stage=True
    )
    assert devices == ["meta"]


def test_what_is_no_sum_or_divided_later_stays(parallel, divide):
    parallel(context_parallel_size=2)
    assert divide(6, outputs=2) == (12 * 2 / 2, 0)  # a mean: x CP / microbatches
    assert divide(6, calculate_per_token_loss=True) == (12, 0)


def test_one_context_parallel_rank_has_all_tokens(parallel, divide):
    parallel()
    assert divide(6) == (12 / 6 / 2, 0)


def test_the_group_of_the_model_takes_the_place_of_the_global_one(parallel, divide):
    parallel(context_parallel_size=2)
    alone = SimpleNamespace(size=lambda: 1)
    wrapped = SimpleNamespace(module=SimpleNamespace(cp_group=alone))
    assert divide(6, model=wrapped) == (12 / 6 / 2, 0)
