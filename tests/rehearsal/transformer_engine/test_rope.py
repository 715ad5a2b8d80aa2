"""Rotary position embedding: fused kernels against TransformerEngine's unfused ones, two ranks against one."""

import pytest
import torch

te = pytest.importorskip("transformer_engine.pytorch")
tex = pytest.importorskip("transformer_engine_torch")
rope = pytest.importorskip("transformer_engine.pytorch.attention.rope")
pytestmark = pytest.mark.forked("torch")
SHAPES = {"sbhd": (16, 2, 4, 12), "bshd": (2, 16, 4, 12), "thd": (20, 4, 12)}
FORMATS = {name: getattr(tex.NVTE_QKV_Format, f"NVTE_{name.upper()}") for name in SHAPES}


@pytest.mark.parametrize("interleaved", [False, True], ids=["", "interleaved"])
@pytest.mark.parametrize("form", SHAPES)
def test_fused_equals_unfused(form, interleaved, assert_same, assert_same_gradients):
    angles = rope.RotaryPositionEmbedding(8, interleaved=interleaved)(16)
    ends = torch.tensor([0, 4, 20], dtype=torch.int32) if form == "thd" else None
    x = torch.randn(*SHAPES[form], requires_grad=True)
    how = {"tensor_format": form, "interleaved": interleaved, "cu_seqlens": ends}
    fused, unfused = (rope.apply_rotary_pos_emb(x, angles, fused=fused, **how) for fused in (True, False))
    assert_same(fused, unfused)
    assert_same_gradients(fused, unfused, [x])


@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_each_of_two_ranks_rotates_by_its_own_positions(form, assert_same):
    angles = rope.RotaryPositionEmbedding(12)(16)
    ends = torch.tensor([0, 4, 20], dtype=torch.int32)
    x = torch.randn(SHAPES[form])
    more = (None, FORMATS[form], False, ends if form == "thd" else None)
    whole = tex.fused_rope_forward(x, angles, *more, 1, 0)
    for rank in (0, 1):
        if form == "thd":
            mine = tex.thd_get_partitioned_indices(ends, 20, 2, rank).long()
        else:
            chunks = torch.arange(16).chunk(4)
            mine = torch.cat((chunks[rank], chunks[3 - rank]))
        assert_same(tex.fused_rope_forward(x[mine].contiguous(), angles, *more, 2, rank), whole[mine])


def test_lengths_of_packed_sequences_must_have_one_dimension():
    """The real kernel requires it, too. 0.16.1's pretrain_gpt.py passes two dimensions and must not seem to train."""
    angles = rope.RotaryPositionEmbedding(8)(16)
    ends = torch.tensor([[0, 4, 20]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="cu_seqlens: expected 1D tensor"):
        tex.fused_rope_forward(torch.randn(SHAPES["thd"]), angles, None, FORMATS["thd"], False, ends, 1, 0)


def test_queries_keys_and_values_together(assert_same):
    """The tensor is [length, batch, groups, (2 queries, key, value) * width]."""
    angles, width = rope.RotaryPositionEmbedding(8)(16), 8
    splits = [2 * width, width, width]
    qkv = torch.randn(16, 2, 3, sum(splits))
    how = (None, splits, FORMATS["sbhd"], False, 1, 0)
    actual = tex.fused_qkv_rope_forward(qkv, angles, angles, *how)
    q, k, v = qkv.split(splits, -1)
    leaves = [q.reshape(16, 2, 6, width), k, v]
    rotated = [rope.apply_rotary_pos_emb(one, angles, tensor_format="sbhd", fused=False) for one in leaves[:2]]
    for one, expected in zip(actual, [*rotated, v], strict=True):
        assert_same(one, expected)
    # The gradient of a rotation is the inverse rotation, so the backward of the output gives the input.
    back = tex.fused_qkv_rope_backward(*actual, angles, angles, *how[1:])
    assert_same(back, qkv)
