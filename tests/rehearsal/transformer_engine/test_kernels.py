"""Kernels with options that the modules of the other files do not use: these tests call the kernels directly."""

import itertools

import pytest
import torch
from torch.nn import functional as F

te = pytest.importorskip("transformer_engine.pytorch")
tex = pytest.importorskip("transformer_engine_torch")
pytestmark = pytest.mark.forked("torch")
FLOAT = int(tex.DType.kFloat32)

PLAIN = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x) ** 2,
    "silu": F.silu,
}
GATES = {"glu": torch.sigmoid} | {
    gated: PLAIN[plain]
    for plain, gated in {
        "gelu": "geglu",
        "qgelu": "qgeglu",
        "relu": "reglu",
        "srelu": "sreglu",
        "silu": "swiglu",
    }.items()
}


def gated(gate):
    return lambda x: gate(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def clamped(x):
    first, second = x.chunk(2, -1)
    first, second = first.clamp(max=7.0), second.clamp(-7.0, 7.0)
    return first * torch.sigmoid(1.702 * first) * (second + 1)


def forward_and_gradient(function, x):
    x = x.detach().requires_grad_()
    out = function(x)
    grad = torch.randn_like(out)
    return out.detach(), grad, torch.autograd.grad(out, x, grad)[0]


@pytest.mark.parametrize("name", [*PLAIN, *GATES])
def test_activations(name, assert_same):
    x = torch.randn(6, 8)
    out, grad, expected = forward_and_gradient(PLAIN.get(name) or gated(GATES[name]), x)
    assert_same(getattr(tex, name)(x, None), out)
    assert_same(getattr(tex, f"d{name}")(grad, x, None), expected)
    if name in PLAIN:
        bias, actual = getattr(tex, f"dbias_d{name}")(grad, x, None)
        assert_same(actual, expected)
        assert_same(bias, expected.sum(0))


def test_clamped_swiglu(assert_same):
    x = torch.randn(6, 8) * 8
    out, grad, expected = forward_and_gradient(clamped, x)
    assert_same(tex.clamped_swiglu(x, None), out)
    assert_same(tex.clamped_dswiglu(grad, x, None), expected)


def masked_softmax(mask, scale):
    return lambda x: torch.softmax((x * scale).masked_fill(mask, -torch.inf), -1)


@pytest.mark.parametrize("kind", ["", "masked_", "upper_triang_masked_", "aligned_causal_masked_"])
def test_softmax(kind, assert_same):
    shape = (4, 8, 8) if kind == "upper_triang_masked_" else (2, 2, 6, 8)
    mask = torch.zeros(shape[-2:], dtype=torch.bool)
    inputs = []
    if kind == "masked_":
        mask = torch.rand(2, 1, 6, 8) < 0.3
        inputs = [mask]
    elif kind:
        mask = torch.ones(shape[-2:], dtype=torch.bool).triu(1 + shape[-1] - shape[-2])
    x = torch.randn(shape).bfloat16()
    out, grad, expected = forward_and_gradient(masked_softmax(mask, 0.5), x.float())
    actual = getattr(tex, f"scaled_{kind}softmax_forward")(x, *inputs, 0.5)
    assert_same(actual, out, x.dtype)
    assert_same(getattr(tex, f"scaled_{kind}softmax_backward")(grad.bfloat16(), actual, 0.5), expected, x.dtype)


def test_a_row_that_is_masked_completely_is_zero():
    mask = torch.ones(1, 1, 2, 8, dtype=torch.bool)
    assert not tex.scaled_masked_softmax_forward(torch.randn(1, 1, 2, 8).half(), mask, 1.0).any()


def test_dropout(assert_same):
    x = torch.randn(200, 50)
    out, mask = tex.dropout_fwd(x, 0.25)
    assert_same(out, x * mask / 0.75)
    assert 0.7 < mask.float().mean() < 0.8
    assert_same(tex.dropout_bwd(x, mask, 0.25), out)


def test_the_backward_of_an_rms_norm_adds_a_gradient(assert_same):
    x, grad, add, weight = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 8), torch.randn(8)
    _, _, rsigma = tex.rmsnorm_fwd(x, weight, 1e-5, None, None, FLOAT, 0, False)
    alone = tex.rmsnorm_bwd(grad, x, rsigma, weight, 0, False)
    added = tex.rmsnorm_bwd_add(grad, x, add, rsigma, weight, 0, False)
    assert_same(added[0], alone[0] + add)
    assert_same(added[1], alone[1])


def gemm(A, B, layout="TN", D=None, bias=None, gelu=False, gelu_in=None, grad=False, accumulate=False, **more):
    transA, transB = (letter == "T" for letter in layout)
    words = (A, transA, B, transB, D, None, FLOAT, bias, FLOAT, gelu, gelu_in, grad, None, 0, accumulate, False)
    return tex.generic_gemm(*words, **more)


def test_products(assert_same):
    weight, x, grad = torch.randn(5, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 5)
    bias, out = torch.randn(5), torch.randn(3, 2, 5)
    product = x @ weight.t()
    assert_same(gemm(weight, x)[0], product)
    assert_same(gemm(weight, x, bias=bias)[0], product + bias)
    assert_same(gemm(weight, x, D=out.clone(), accumulate=True)[0], product + out)
    assert_same(gemm(weight, x, D=out.clone(), accumulate=True, alpha=2.0, beta=0.5)[0], 2 * product + out / 2)
    activated, _, before, _ = gemm(weight, x, bias=bias, gelu=True)
    assert_same(before, product + bias)
    assert_same(activated, F.gelu(product + bias, approximate="tanh"))
    assert_same(gemm(weight, grad, "NN", grad=True)[0], grad @ weight)
    weight_grad, bias_grad = gemm(x, grad, "NT", bias=torch.empty(5), grad=True)[:2]
    assert_same(weight_grad, torch.einsum("sbo,sbi->oi", grad, x))
    assert_same(bias_grad, grad.sum((0, 1)))


def test_a_backward_product_through_gelu(assert_same):
    weight, grad = torch.randn(5, 8), torch.randn(6, 5)
    before = torch.randn(6, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(F.gelu(before, approximate="tanh"), before, grad @ weight)
    actual, bias_grad, _, _ = gemm(
        weight, grad, "NN", bias=torch.empty(8), gelu=True, gelu_in=before.detach(), grad=True
    )
    assert_same(actual, expected)
    assert_same(bias_grad, expected.sum(0))


def test_products_of_experts_in_one_tensor(assert_same):
    weights = [torch.randn(5, 8) for _ in range(3)]
    x = torch.randn(7, 8).split([4, 0, 3])
    none = [torch.empty(0)] * 3
    start = torch.randn(7, 5)
    for accumulate in (False, True):
        out = start.clone()
        words = (weights, True, list(x), False, [out], FLOAT, [4, 0, 3], none, FLOAT, True, none, False, None, 0)
        tex.te_general_grouped_gemm(*words, accumulate, False, 0)
        expected = torch.cat([part @ weight.t() for part, weight in zip(x, weights, strict=True)])
        assert_same(out, expected + start if accumulate else expected)


def test_the_gradient_of_a_bias(assert_same):
    grad = torch.randn(3, 2, 5)
    bias_grad, same = tex.bgrad_quantize(grad, None)
    assert_same(bias_grad, grad.sum((0, 1)))
    assert same is grad


def test_packed_and_dense(assert_same):
    ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    x = torch.randn(7, 2, 4)
    dense = tex.convert_thd_to_bshd(x, ends, 3, 5)
    assert dense.shape == (3, 5, 2, 4)
    assert_same(dense[0, :3], x[:3])
    assert_same(dense[2, :4], x[3:])
    assert not dense[1].any() and not dense[0, 3:].any()
    assert_same(tex.convert_bshd_to_thd(dense, ends, 7), x)
    swapped = tex.swap_first_dims(x)
    assert swapped.is_contiguous() and torch.equal(swapped, x.transpose(0, 1))
    assert torch.equal(tex.swap_first_dims(x, out=torch.empty_like(swapped)), swapped)


ENDS = torch.tensor([0, 4, 4, 10], dtype=torch.int32)  # a rank's part of three sequences, the second empty
FIRST, SECOND = torch.tensor([0, 1, 4, 5, 6]), torch.tensor([2, 3, 7, 8, 9])


def test_halves_of_packed_sequences():
    x = torch.randn(10, 2, 4)
    assert torch.equal(tex.thd_read_half_tensor(x, ENDS, 0), x[FIRST])
    assert torch.equal(tex.thd_read_half_tensor(torch.stack((x, -x)), ENDS, 1), torch.stack((x[SECOND], -x[SECOND])))
    statistics = torch.randn(2, 10)
    half = tex.thd_read_second_half_lse(statistics, ENDS, True, 6)
    assert torch.equal(half[:, :5], statistics[:, SECOND]) and half.shape == (2, 6)


@pytest.mark.parametrize("only_second_half", [False, True])
def test_the_parts_of_a_packed_softmax_add_up_to_the_whole(only_second_half, assert_same):
    """The parts are two steps over the keys; the second may have only second halves."""
    scores, values = torch.randn(2, 10, 8), torch.randn(2, 8, 3)
    if only_second_half:
        scores[:, FIRST, 4:] = -torch.inf
    expected = (torch.softmax(scores, -1) @ values).transpose(0, 1)
    steps = [(scores[..., keys].logsumexp(-1), scores[..., keys].softmax(-1) @ values[:, keys]) for keys in HALVES]
    (one_lse, one), (other_lse, other) = steps
    if only_second_half:
        other_lse, other = other_lse[:, SECOND].contiguous(), other[:, SECOND]
    lse = one_lse.clone()
    if only_second_half:
        tex.thd_second_half_lse_correction(lse, other_lse, ENDS, True)
    else:
        lse = torch.logaddexp(one_lse, other_lse)
    assert_same(lse, scores.logsumexp(-1))
    out = torch.zeros(10, 2, 3)
    tex.thd_out_correction(out, one.transpose(0, 1).contiguous(), lse, one_lse, ENDS, False, True)
    tex.thd_out_correction(out, other.transpose(0, 1).contiguous(), lse, other_lse, ENDS, only_second_half, True)
    assert_same(out, expected)


HALVES = (slice(0, 4), slice(4, 8))


@pytest.mark.parametrize("actions", itertools.permutations(("copy", "add", "none"), 2), ids=str)
def test_gradients_of_halves(actions):
    grad, step = torch.randn(10, 2, 4), torch.randn(10, 2, 4)
    expected = grad.clone()
    if "none" in actions:
        step = step[:5]
    for at, action in zip((FIRST, SECOND), actions, strict=True):
        part = step if "none" in actions else step[at]
        if action != "none":
            expected[at] = part if action == "copy" else expected[at] + part
    tex.thd_grad_correction(grad, step, ENDS, *actions)
    assert torch.equal(grad, expected)


def test_dropped_tokens_come_back_as_zero():
    x, chosen = torch.randn(4, 8), torch.tensor([[0], [1], [0], [1]], dtype=torch.int32)
    permuted, rows, _ = tex.moe_permute_fwd(x, 0, chosen, 3, [], 0)  # one slot too few
    assert torch.equal(permuted, x[[0, 2, 1]])
    back = tex.moe_unpermute_fwd(permuted, 0, rows, torch.empty(0), 4, 1)
    assert torch.equal(back, x * torch.tensor([[1.0], [1.0], [1.0], [0.0]]))
    assert torch.equal(tex.moe_permute_bwd(permuted, 0, rows, torch.empty(0), 4, 1), back)
