"""Megatron's own Triton kernels, which run in Triton's interpreter in a rehearsal, against plain torch."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformer_engine.pytorch", reason="a rehearsal interprets Triton where it has TransformerEngine")
pytestmark = pytest.mark.forked("megatron")

LENGTH, BATCH, HEADS, PLAIN, ROTATED, VALUES = 6, 2, 2, 8, 8, 8
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def assert_close(actual, expected, dtype):
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(actual.float(), expected.float(), rtol=8 * eps, atol=8 * eps)


def assert_same_gradients(actual, expected, inputs, again, dtype):
    grads = [torch.randn_like(one) for one in expected]
    copies = [grad.to(dtype, copy=True) for grad in grads]  # some are written in place
    got = torch.autograd.grad(actual, inputs, copies)
    for one, other in zip(got, torch.autograd.grad(expected, again, grads), strict=True):
        assert_close(one, other, dtype)


@pytest.fixture
def angles():
    torch.manual_seed(0)
    angle = torch.rand(LENGTH, 1, 1, ROTATED // 2).repeat(1, 1, 1, 2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """The pairs of neighbours in x, rotated, with the first of all pairs before the second."""
    half = ROTATED // 2
    first, second = x[..., 0::2], x[..., 1::2]
    left = first * cos[..., :half] - second * sin[..., :half]
    return torch.cat((left, second * cos[..., half:] + first * sin[..., half:]), -1)


def copies(dtype, *shape):
    """A leaf in `dtype`, and the same numbers as a leaf in fp32."""
    one = torch.randn(*shape).to(dtype)
    return one.requires_grad_(), one.detach().float().requires_grad_()


@each_dtype
def test_rope_of_mla_queries(angles, dtype):
    from megatron.core.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_q

    cos, sin = (one.to(dtype) for one in angles)
    q, again = copies(dtype, LENGTH, BATCH, HEADS, PLAIN + ROTATED)
    actual = fused_apply_mla_rope_for_q(q * 1, cos, sin, PLAIN, ROTATED)
    rotated = rotate(again[..., PLAIN:], cos.float(), sin.float())
    expected = torch.cat((again[..., :PLAIN], rotated), -1)
    assert_close(actual, expected, dtype)
    assert_same_gradients([actual], [expected], [q], [again], dtype)


@each_dtype
def test_rope_of_mla_keys(angles, dtype):
    from megatron.core.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_kv

    cos, sin = (one.to(dtype) for one in angles)
    kv, kv_again = copies(dtype, LENGTH, BATCH, HEADS, PLAIN + VALUES)
    position, position_again = copies(dtype, LENGTH, BATCH, 1, ROTATED)
    actual = fused_apply_mla_rope_for_kv(kv, position, cos, sin, ROTATED, PLAIN, VALUES)
    rotated = rotate(position_again, cos.float(), sin.float()).expand(-1, -1, HEADS, -1)
    expected = torch.cat((kv_again[..., :PLAIN], rotated), -1), kv_again[..., PLAIN:]
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, dtype)
    assert_same_gradients(actual, expected, [kv, position], [kv_again, position_again], dtype)


@each_dtype
def test_indices_of_experts_to_a_map(dtype):
    from megatron.core.fusions.fused_indices_converter import fused_indices_to_multihot

    experts = 4
    torch.manual_seed(0)
    indices = torch.rand(LENGTH, experts).topk(2).indices
    indices[2, 1] = -1  # an expert of another rank
    probs, again = copies(dtype, LENGTH, 2)
    routed, actual = fused_indices_to_multihot(indices, probs, experts)
    token, slot = (indices >= 0).nonzero(as_tuple=True)
    expected = torch.zeros(LENGTH, experts).index_put((token, indices[token, slot]), again[token, slot])
    assert torch.equal(routed.bool(), expected != 0)
    assert_close(actual, expected, dtype)
    assert_same_gradients([actual], [expected], [probs], [again], dtype)


def test_padding_of_a_routing_map():
    from megatron.core.fusions.fused_pad_routing_map import fused_pad_routing_map

    routed = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 1], [1, 0, 0], [1, 0, 0]])
    expected = torch.tensor([[1, 0, 1], [1, 0, 1], [0, 0, 1], [1, 0, 1], [1, 0, 0]])
    assert torch.equal(fused_pad_routing_map(routed.bool(), 4).int(), expected.int())
