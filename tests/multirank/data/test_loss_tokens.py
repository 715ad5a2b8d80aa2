"""Without per-token loss the main loss of a microbatch is a mean over the tokens of all context-parallel ranks."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from megatron.core.transformer import TransformerConfig

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-loss-tokens-over-cp"), pytest.mark.ranks(2)]

MICROBATCHES = 2
MEAN = torch.tensor(12.0), {}


def sum_over(tokens):
    """What a loss function returns of a sum over this number of tokens."""
    return torch.tensor(12.0), torch.tensor(tokens, dtype=torch.int), {}


@pytest.fixture
def divide(count_collectives):
    """divide(what the loss function returns): (the loss that is trained, the number of all-reduces)."""

    def run(returned, model=None, **settings):
        count_collectives.clear()
        loss, _ = forward_step_calc_loss(
            model,
            torch.tensor(12.0),
            lambda output: returned,
            TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, **settings),
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=MICROBATCHES,
            forward_data_store=[],
            cp_group_size=parallel_state.get_context_parallel_world_size(),
            is_last_stage=True,
        )
        return float(loss), count_collectives.count("all_reduce")

    return run


def test_the_tokens_of_all_context_parallel_ranks_count(parallel, divide, rank):
    parallel(context_parallel_size=2)
    tokens = 6 if rank == 0 else 0
    assert divide(sum_over(tokens)) == (12 * 2 / 6 / MICROBATCHES, 1)  # the sum x CP / all tokens / microbatches


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
    assert divide(MEAN) == (12 * 2 / MICROBATCHES, 0)  # x CP / microbatches
    assert divide(sum_over(6), calculate_per_token_loss=True) == (12, 0)


def test_one_context_parallel_rank_has_all_tokens(parallel, divide):
    parallel()
    assert divide(sum_over(6)) == (12 / 6 / MICROBATCHES, 0)


def test_the_group_of_the_model_takes_the_place_of_the_global_one(parallel, divide):
    parallel(context_parallel_size=2)
    alone = SimpleNamespace(size=lambda: 1)
    wrapped = SimpleNamespace(module=SimpleNamespace(cp_group=alone))
    assert divide(sum_over(6), model=wrapped) == (12 / 6 / MICROBATCHES, 0)
