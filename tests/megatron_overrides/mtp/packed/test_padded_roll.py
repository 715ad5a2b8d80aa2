"""Packed sequences with padding on one rank: rolls, inputs of an MTP layer, targets, masks and losses of the heads."""

import inspect
from types import SimpleNamespace

import megatron_mtp_patches
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.multi_token_prediction import roll_tensor

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

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("roll-padded-packed-sequences")]

PACK = Pack(((5, 8), (3, 4), (8, 8), (6, 8)))
TOKENS = list(range(1, PACK.size + 1))


@examples(200)
@given(pack=packs(), dtype=st.sampled_from([torch.int64, torch.float32, torch.bool]), has_group=st.booleans())
def test_every_depth_is_a_roll_of_each_sequence(pack, dtype, has_group):
    """Padding holds numbers as well, which must not come in."""
    expected = torch.arange(1, pack.size + 1).remainder(3 if dtype == torch.bool else 10**6).to(dtype).tolist()
    rolled = torch.tensor([expected])
    group = torch.distributed.group.WORLD if has_group else None
    for _ in range(DEPTHS):
        rolled, total = roll_tensor(rolled, cp_group=group, packed_seq_params=pack.params())
        expected = pack.roll(expected)
        assert rolled.dtype == dtype and rolled[0].tolist() == expected
        assert total.item() == sum(expected)


@examples(100)
@given(pack=packs(), with_labels=st.booleans(), with_mask=st.booleans())
def test_heads_see_the_targets_and_weights_of_each_sequence(pack, with_labels, with_mask):
    tokens = list(range(1, pack.size + 1))
    mask = [0 if token % 3 == 0 else 1 for token in tokens] if with_mask else None
    labels = [token + 1 for token in tokens] if with_labels else None
    actual = heads(pack, labels=labels, input_ids=tokens, loss_mask=mask)
    expected = expected_heads(pack, labels=labels, tokens=tokens, loss_mask=mask)
    assert actual.targets == expected.targets
    torch.testing.assert_close(actual.weights, expected.weights, rtol=1e-6, atol=0)


@examples(100)
@given(pack=packs())
def test_an_mtp_layer_gets_the_tokens_positions_and_padding_of_each_sequence(pack):
    actual = layer_inputs(pack)
    assert actual == expected_layer_inputs(actual, pack)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_slot_after_the_last_token_is_padding_in_a_pack_without_padded_bounds_too(is_packed):
    """Of two sequences that lie side by side. Without packing upstream's own tests want the opposite."""
    mask = [False, True, False, False, False, True, False, False]
    expected = [True, False, False, is_packed, True, False, False, is_packed]
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 4, 8])) if is_packed else None
    embed = mtp.MultiTokenPredictionLayer._get_embeddings
    if "padding_mask" not in inspect.signature(embed).parameters:
        pytest.skip("layers roll a padding mask from 0.18 on")
    tokens = torch.arange(8).view(1, 8)
    _, _, rolled, *_ = embed(
        SimpleNamespace(config=TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1), cp_group=None),
        tokens,
        tokens,
        embedding=lambda input_ids, position_ids: input_ids,
        hidden_states=torch.zeros(8, 1, 4),
        packed_seq_params=packed,
        padding_mask=torch.tensor([mask]),
    )
    assert rolled.tolist() == [expected]


def test_where_the_patch_is_left_out_padding_counts_as_before():
    expected = expected_heads(PACK, labels=TOKENS)
    megatron_mtp_patches.revert()
    try:
        megatron_mtp_patches.apply("-roll-padded-packed-sequences")
        actual = heads(PACK, labels=TOKENS)
    finally:
        megatron_mtp_patches.revert()
        megatron_mtp_patches.apply()
    assert sum(map(bool, actual.weights[0])) > sum(map(bool, expected.weights[0]))
    assert heads(PACK, labels=TOKENS).targets == expected.targets != actual.targets


def test_a_model_counts_the_targets_of_each_sequence(make_gpt):
    model = make_gpt(PACK.size + 1, PACK.size)
    tokens = torch.tensor([TOKENS])
    model._postprocess(
        hidden_states=torch.randn(3 * PACK.size, 1, 16, requires_grad=True),
        input_ids=tokens,
        position_ids=tokens,
        labels=tokens,
        rotary_pos_emb=None,
        rotary_pos_cos=None,
        rotary_pos_sin=None,
        mtp_in_postprocess=False,
        packed_seq_params=PACK.params(),
    )
    assert mtp.MTPLossLoggingHelper.tracker["total_values"].tolist() == [18, 14]


def test_the_sum_is_left_out_where_upstream_lets_one_ask_for_that():
    roll = mtp._roll_tensor_packed_seq
    tensor = torch.tensor([TOKENS])
    if "return_sum" in inspect.signature(roll).parameters:
        assert roll(tensor, -1, -1, PACK.params(), return_sum=False)[1] is None
    assert roll(tensor, -1, -1, PACK.params())[1].item() == sum(PACK.roll(TOKENS))


@pytest.mark.parametrize("how", [{"shifts": -2}, {"dims": 0}])
def test_another_shift_or_dimension_is_refused_as_upstream_does(how):
    with pytest.raises(AssertionError, match="Packed sequence roll only supports"):
        roll_tensor(torch.tensor([TOKENS]), packed_seq_params=PACK.params(), **how)


def test_bounds_that_are_missing_are_refused_as_upstream_does():
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q_padded=torch.tensor([0, 8]))
    with pytest.raises(AssertionError, match="must provide cu_seqlens_q"):
        roll_tensor(torch.arange(8).view(1, 8), packed_seq_params=packed)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_there_is_no_host_device_sync(rank, monkeypatch):
    """Tensors on the meta device hold no numbers, so reading one on the host raises an error."""
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0, 1, 2])
    monkeypatch.setattr(torch.distributed, "P2POp", lambda *message: message)
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", lambda messages: [])
    group = SimpleNamespace(rank=lambda: rank, size=lambda: 3)
    params = Pack(((5, 6), (0, 6), (12, 12))).params()
    params.cu_seqlens_q, params.cu_seqlens_q_padded = (
        bounds.to("meta") for bounds in (params.cu_seqlens_q, params.cu_seqlens_q_padded)
    )
    tensor = torch.empty(1, 8, dtype=torch.int64, device="meta")
    assert roll_tensor(tensor, cp_group=group, packed_seq_params=params)[0].shape == tensor.shape
    assert mtp.ones_without_padding(tensor, params, group).shape == tensor.shape


@pytest.mark.parametrize("field, value", [("cu_seqlens_q_padded", None), ("local_cp_size", 1)])
def test_without_padding_or_with_hybrid_context_parallelism_nothing_changes(field, value, unpatched):
    params = PACK.params()
    setattr(params, field, value)
    tensor = torch.tensor([TOKENS])
    actual = roll_tensor(tensor, packed_seq_params=params)
    with unpatched():
        expected = mtp.roll_tensor(tensor, packed_seq_params=params)
    assert torch.equal(actual[0], expected[0]) and actual[1] == expected[1]
    assert torch.equal(mtp.ones_without_padding(tensor, params, None), torch.ones_like(tensor))


def test_gradients_go_where_the_values_came_from():
    """main rolls hidden states, too."""
    values = torch.arange(1.0, PACK.size + 1).requires_grad_()
    rolled, _ = roll_tensor(values, packed_seq_params=PACK.params())
    rolled.backward(torch.arange(1.0, PACK.size + 1))
    back = [float(slot) for slot in PACK.roll(TOKENS)]
    expected = [0.0] * PACK.size
    for slot, token in enumerate(back):
        if token:
            expected[int(token) - 1] = slot + 1.0
    assert values.grad.tolist() == expected
