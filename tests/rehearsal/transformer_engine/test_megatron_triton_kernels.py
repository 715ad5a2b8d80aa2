"""Megatron's own Triton kernels run in Triton's interpreter in a rehearsal: one of them, against plain torch."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformer_engine.pytorch", reason="a rehearsal interprets Triton where it has TransformerEngine")
pytestmark = pytest.mark.forked("megatron")

LENGTH, BATCH, HEADS, PLAIN, ROTATED = 6, 2, 2, 8, 8


def rotate(x, cos, sin):
    """The pairs of neighbours in x, rotated, with the first of all pairs before the second."""
    half = ROTATED // 2
    first, second = x[..., 0::2], x[..., 1::2]
    left = first * cos[..., :half] - second * sin[..., :half]
    return torch.cat((left, second * cos[..., half:] + first * sin[..., half:]), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rope_of_mla_queries(dtype):
    from megatron.core.fusions.fused_mla_yarn_rope_apply import fused_apply_mla_rope_for_q

    angle = torch.rand(LENGTH, 1, 1, ROTATED // 2).repeat(1, 1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q = torch.randn(LENGTH, BATCH, HEADS, PLAIN + ROTATED).to(dtype).requires_grad_()
    again = q.detach().float().requires_grad_()
    actual = fused_apply_mla_rope_for_q(q * 1, cos, sin, PLAIN, ROTATED)
    expected = torch.cat((again[..., :PLAIN], rotate(again[..., PLAIN:], cos.float(), sin.float())), -1)
    tolerance = dict.fromkeys(("rtol", "atol"), 8 * torch.finfo(dtype).eps)
    torch.testing.assert_close(actual.float(), expected, **tolerance)
    grad = torch.randn_like(expected)
    (right,) = torch.autograd.grad(expected, again, grad)
    (found,) = torch.autograd.grad(actual, q, grad.to(dtype, copy=True))  # the kernel writes into it
    torch.testing.assert_close(found.float(), right, **tolerance)
