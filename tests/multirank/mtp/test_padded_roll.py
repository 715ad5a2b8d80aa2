"""Packed sequences with padding over context-parallel ranks: each rank has what it would have of an unsharded roll.

Every rank draws the same examples, and judges what all ranks have seen: so they fail, and look for less, together.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainings.packed_batches import (
    DEPTHS,
    Pack,
    expected_heads,
    expected_layer_inputs,
    heads,
    layer_inputs,
    packs,
)
from tests.trainings.random_optimizers import examples

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("roll-padded-packed-sequences"),
    pytest.mark.ranks(2, 4),
]


@pytest.fixture
def cut(parallel, rank, world_size):
    """cut.of(pack, values): this rank's part; cut.group: its context-parallel group, of all ranks."""
    parallel(context_parallel_size=world_size)
    from megatron.core import parallel_state

    return SimpleNamespace(
        group=parallel_state.get_context_parallel_group(),
        place=(rank, world_size),
        of=lambda pack, values: pack.of_rank(values, rank, world_size),
    )


@examples(15)
@given(data=st.data(), dtype=st.sampled_from([torch.int64, torch.float32, torch.bool]))
def test_every_depth_is_the_unsharded_roll(data, dtype, cut, world_size, from_all_ranks):
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    pack = data.draw(packs(world_size))
    expected = torch.arange(1, pack.size + 1).remainder(3 if dtype == torch.bool else 10**6).to(dtype).tolist()
    rolled = torch.tensor([cut.of(pack, expected)])
    seen = []
    for _ in range(DEPTHS):
        rolled, total = roll_tensor(rolled, cp_group=cut.group, packed_seq_params=pack.params())
        expected = pack.roll(expected)
        mine = cut.of(pack, expected)
        seen.append((rolled.dtype == dtype, rolled[0].tolist() == mine, total.item() == sum(mine)))
    assert from_all_ranks(seen) == [[(True, True, True)] * DEPTHS] * world_size


@examples(15)
@given(data=st.data(), with_labels=st.booleans(), with_mask=st.booleans())
def test_heads_see_the_targets_and_weights_of_the_unsharded_pack(
    data, with_labels, with_mask, cut, world_size, from_all_ranks
):
    pack = data.draw(packs(world_size))
    tokens = list(range(1, pack.size + 1))
    given_mask = [0 if token % 3 == 0 else 1 for token in tokens] if with_mask else None
    labels = [token + 1 for token in tokens] if with_labels else None
    actual = heads(
        pack,
        *cut.place,
        cp_group=cut.group,
        labels=labels,
        input_ids=tokens,
        loss_mask=given_mask,
    )
    expected = expected_heads(pack, *cut.place, labels=labels, tokens=tokens, loss_mask=given_mask)
    for here, reference in from_all_ranks((actual, expected)):
        assert here.targets == reference.targets
        torch.testing.assert_close(here.weights, reference.weights, rtol=1e-6, atol=0)


@examples(15)
@given(data=st.data())
def test_an_mtp_layer_gets_the_inputs_of_the_unsharded_pack(data, cut, world_size, from_all_ranks):
    pack = data.draw(packs(world_size))
    actual = layer_inputs(pack, *cut.place, cp_group=cut.group)
    assert from_all_ranks(actual == expected_layer_inputs(actual, pack, *cut.place)) == [True] * world_size


def test_each_neighbour_gets_one_message_for_all_sequences(cut, rank, world_size, monkeypatch):
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    sent = []
    original = torch.distributed.batch_isend_irecv
    monkeypatch.setattr(
        torch.distributed, "batch_isend_irecv", lambda messages: (sent.extend(messages), original(messages))[1]
    )
    pack = Pack(((3, 2 * world_size),) * 5)
    roll_tensor(
        torch.tensor([cut.of(pack, list(range(pack.size)))]), cp_group=cut.group, packed_seq_params=pack.params()
    )
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < world_size]
    assert sorted(message.peer for message in sent) == sorted(2 * peers)


@examples(15)
@given(data=st.data())
def test_without_padded_bounds_sequences_are_rolled_and_empty_ones_left_out(data, cut, world_size, from_all_ranks):
    """Megatron's own roll; that of 0.16 fails on an empty sequence."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    full = data.draw(packs(world_size))
    pack = Pack(tuple((slots, slots) for _, slots in full.sequences), full.tail)
    params = pack.params()
    params.cu_seqlens_q_padded = data.draw(st.sampled_from([None, params.cu_seqlens_q]))
    values = list(range(1, pack.size + 1))
    rolled, _ = roll_tensor(torch.tensor([cut.of(pack, values)]), cp_group=cut.group, packed_seq_params=params)
    expected = pack.roll(values)[: pack.size - pack.tail] + values[pack.size - pack.tail :]  # the tail stays as it is
    assert from_all_ranks(rolled[0].tolist() == cut.of(pack, expected)) == [True] * world_size
