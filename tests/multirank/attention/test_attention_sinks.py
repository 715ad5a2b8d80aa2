"""Context-parallel ranks share the gradient of learnable attention sinks, which TransformerEngine gathers on each."""

import pytest
import torch
from megatron.core import parallel_state

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-sink-gradients-once"), pytest.mark.ranks(2, 4)]

context_parallel = pytest.importorskip(
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel", reason="it deals out the sinks"
)


@pytest.fixture
def communicate(parallel, world_size):
    """communicate(tensor, dimension of heads, before_attn): what TransformerEngine gives this rank."""
    parallel(context_parallel_size=world_size)
    group, stream = parallel_state.get_context_parallel_group(), torch.cuda.Stream()

    def call(tensor, heads, before_attn):
        return context_parallel.flash_attn_a2a_communicate_softmax_offset(
            tensor, heads, world_size, group, stream, before_attn
        )

    return call


def test_the_gradients_of_all_ranks_add_up_to_that_of_the_sinks(communicate, rank, from_all_ranks, world_size):
    own = torch.full((1, 1, 1, 1), rank + 1.0)
    total = sum(from_all_ranks(communicate(own, 1, False)))
    assert total.flatten().tolist() == [one + 1.0 for one in range(world_size)]


def test_the_largest_logits_are_gathered_as_they_are(communicate, rank, world_size):
    logits = communicate(torch.full((1,), rank + 1.0), 0, False)
    assert logits.tolist() == [one + 1.0 for one in range(world_size)]


def test_the_sinks_are_dealt_out_as_they_are(communicate, rank, world_size):
    sinks = torch.arange(world_size, dtype=torch.float32).view(1, -1, 1, 1)
    assert communicate(sinks, 1, True).flatten().tolist() == [float(rank)]
    assert communicate(None, 1, False) is None
