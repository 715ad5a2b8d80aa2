"""TransformerEngine's modules, forward and backward."""

import pytest
import torch
from torch.nn import functional as F

te = pytest.importorskip("transformer_engine.pytorch")
pytestmark = pytest.mark.forked("torch")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
norms = pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])

ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


def normalize(x, norm, weight, bias, eps):
    width = x.shape[-1:]
    return F.layer_norm(x, width, weight, bias, eps) if norm == "LayerNorm" else F.rms_norm(x, width, weight, eps)


@dtypes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_linear(dtype, bias, assert_same, assert_same_gradients):
    module = te.Linear(32, 48, bias=bias, params_dtype=dtype)
    x = torch.randn(4, 8, 32, dtype=dtype, requires_grad=True)
    parameters = [module.weight, *([module.bias] if bias else [])]
    out, expected = module(x), F.linear(x, *parameters)
    assert_same(out, expected, dtype)
    assert_same_gradients(out, expected, [x, *parameters], dtype, scale=6)


@dtypes
@norms
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centred gamma"])
def test_norm_and_linear_with_a_norm_before_it(dtype, norm, zero_centered, assert_same, assert_same_gradients):
    module = te.LayerNormLinear(32, 48, normalization=norm, params_dtype=dtype, zero_centered_gamma=zero_centered)
    with torch.no_grad():
        module.layer_norm_weight.add_(torch.randn(32) * 0.3)
    x = torch.randn(4, 8, 32, dtype=dtype, requires_grad=True)
    weight = module.layer_norm_weight + (1 if zero_centered else 0)
    normalized = normalize(x, norm, weight, module.layer_norm_bias, module.eps)
    out, expected = module(x), F.linear(normalized, module.weight, module.bias)
    assert_same(out, expected, dtype)
    at = [x, module.weight, module.bias, module.layer_norm_weight]
    at += [module.layer_norm_bias] if norm == "LayerNorm" else []
    grad = torch.randn_like(expected)
    actual = torch.autograd.grad(out, at, grad, retain_graph=True)
    for one, other in zip(actual, torch.autograd.grad(expected, at, grad, retain_graph=True), strict=True):
        assert_same(one / 6, other / 6, dtype)

    alone = getattr(te, norm)(32, zero_centered_gamma=zero_centered, dtype=dtype, device="cuda")
    with torch.no_grad():
        alone.weight.copy_(module.layer_norm_weight)
    out = alone(x)
    assert_same(out, normalized, dtype)
    assert_same_gradients(out, normalized, [x], dtype)


@dtypes
@norms
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_mlp_with_a_norm_before_it(dtype, activation, norm, assert_same, assert_same_gradients):
    module = te.LayerNormMLP(32, 64, normalization=norm, activation=activation, params_dtype=dtype)
    x = torch.randn(4, 8, 32, dtype=dtype, requires_grad=True)
    normalized = normalize(x, norm, module.layer_norm_weight, module.layer_norm_bias, module.eps)
    hidden = ACTIVATIONS[activation](F.linear(normalized, module.fc1_weight, module.fc1_bias))
    out, expected = module(x), F.linear(hidden, module.fc2_weight, module.fc2_bias)
    assert_same(out, expected, dtype)
    parameters = [module.fc1_weight, module.fc2_weight, module.fc1_bias, module.fc2_bias, module.layer_norm_weight]
    assert_same_gradients(out, expected, [x, *parameters], dtype, scale=6)


@dtypes
def test_grouped_linear_with_an_expert_that_has_no_token(dtype, assert_same, assert_same_gradients):
    module = te.GroupedLinear(3, 32, 48, bias=True, params_dtype=dtype)
    x = torch.randn(20, 32, dtype=dtype, requires_grad=True)
    splits = [5, 0, 15]
    experts = [(getattr(module, f"weight{i}"), getattr(module, f"bias{i}")) for i in range(3)]
    out = module(x, splits)
    expected = torch.cat([F.linear(part, *own) for part, own in zip(x.split(splits), experts, strict=True)])
    assert_same(out, expected, dtype)
    at = [x, module.weight0, module.weight2, module.bias0, module.bias2]
    assert_same_gradients(out, expected, at, dtype, scale=6)


def test_the_gradient_of_a_weight_is_added_to_main_grad():
    module = te.Linear(32, 48, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.ones(48, 32)
    module.weight.grad_added_to_main_grad = False
    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(8, 48, dtype=torch.bfloat16)
    module(x).backward(grad)
    expected = 1 + grad.float().t() @ x.float()
    torch.testing.assert_close(module.weight.main_grad, expected, rtol=1e-5, atol=1e-5)


def test_megatrons_own_accumulation_of_a_weight_gradient():
    import fused_weight_gradient_mlp_cuda as apex

    x, grad = torch.randn(3, 8, 32, dtype=torch.bfloat16), torch.randn(3, 8, 48, dtype=torch.bfloat16)
    for accumulate, dtype in ((apex.wgrad_gemm_accum_fp32, torch.float32), (apex.wgrad_gemm_accum_fp16, x.dtype)):
        main_grad = torch.ones(48, 32, dtype=dtype)
        accumulate(x, grad, main_grad)
        expected = 1 + torch.einsum("bsi,bsj->ij", grad.float(), x.float())
        torch.testing.assert_close(main_grad, expected.to(dtype))
