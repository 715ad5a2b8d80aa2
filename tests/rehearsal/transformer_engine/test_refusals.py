"""What a kernel refuses, or reads wrongly without an error, its stand-in refuses. The lists: test_optimizers.py."""

import pytest
import torch

te = pytest.importorskip("transformer_engine.pytorch")
tex = pytest.importorskip("transformer_engine_torch")
pytestmark = pytest.mark.forked("torch")
FLOAT, BFLOAT, HALF = (int(tex.DType[name]) for name in ("kFloat32", "kBFloat16", "kFloat16"))
ENDS = torch.tensor([0, 4, 10], dtype=torch.int32)


def ones(*shape, dtype=torch.bfloat16):
    return torch.ones(shape, dtype=dtype)


def gaps(*shape, dtype=torch.bfloat16):
    """As a slice of the columns of a wider tensor."""
    return ones(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]]


def product(A=None, B=None, D=None, dtype=BFLOAT, bias=None, accumulate=False, beta=None):
    A, B = ones(5, 8) if A is None else A, ones(3, 8) if B is None else B
    words = (A, True, B, False, D, None, dtype, bias, BFLOAT, False, None, False, None, 0, accumulate, False)
    return tex.generic_gemm(*words, beta=beta)[0]


def products(A=None, B=None, D=None, single=False):
    A, B = [ones(5, 8)] if A is None else A, [ones(3, 8)] if B is None else B
    none = [torch.empty(0)]
    words = (A, True, B, False, D, BFLOAT, [3], none, BFLOAT, single, none, False, None, 0, False, False, 0)
    return tex.te_general_grouped_gemm(*words)


def norm(x=None, weight=None, dtype=BFLOAT):
    x, weight = ones(4, 8) if x is None else x, ones(8) if weight is None else weight
    return tex.rmsnorm_fwd(x, weight, 1e-5, None, None, dtype, 0, False)


def norm_gradient(dz=None, add=None):
    dz = ones(4, 8) if dz is None else dz
    words = (dz, ones(4, 8), *([] if add is None else [add]), torch.ones(4), ones(8), 0, False)
    return (tex.rmsnorm_bwd if add is None else tex.rmsnorm_bwd_add)(*words)


def layer_norm(bias):
    return tex.layernorm_fwd(ones(4, 8), ones(8), bias, 1e-5, None, None, BFLOAT, 0, False)


def softmax(*shape, dtype=torch.bfloat16, mask=None, x=None):
    x = ones(*shape, dtype=dtype) if x is None else x
    return tex.scaled_softmax_forward(x, 1.0) if mask is None else tex.scaled_masked_softmax_forward(x, mask, 1.0)


def rope(freqs):
    return tex.fused_rope_forward(ones(4, 2, 3, 8), freqs, None, tex.NVTE_QKV_Format.NVTE_SBHD, False, None, 1, 0)


def permute(x=None, indices=None):
    x = ones(4, 8) if x is None else x
    return tex.moe_permute_fwd(x, BFLOAT, ones(4, 1, dtype=torch.int32) if indices is None else indices, 4, [], 4)


def unpermute(prob):
    return tex.moe_unpermute_fwd(ones(4, 8), BFLOAT, torch.arange(4, dtype=torch.int32), prob, 4, 1)


def half(x=None, ends=ENDS):
    return tex.thd_read_half_tensor(ones(10, 2, 4) if x is None else x, ends, 0)


def out_correction(step=None, lse=None):
    step, lse = ones(10, 2, 4) if step is None else step, torch.ones(2, 10) if lse is None else lse
    return tex.thd_out_correction(ones(10, 2, 4), step, lse, torch.ones(2, 10), ENDS, False, True)


def weight_gradient(bits, x=None, main_grad=None):
    import fused_weight_gradient_mlp_cuda as apex

    main_grad = torch.ones(5, 8) if main_grad is None else main_grad
    return getattr(apex, f"wgrad_gemm_accum_fp{bits}")(ones(3, 8) if x is None else x, ones(3, 5), main_grad)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda: product(B=ones(3, 8, dtype=torch.float32)),
            "generic_gemm: B is torch.float32, expected torch.bfloat16",
        ),
        (lambda: product(A=gaps(5, 8)), "generic_gemm: A has strides"),
        (lambda: product(D=gaps(3, 5)), "generic_gemm: D has strides"),
        (lambda: product(D=ones(3, 5), dtype=FLOAT), "generic_gemm: D has shape and dtype .*bfloat16.*float32"),
        (lambda: product(D=ones(6, 5)), "generic_gemm: D has shape and dtype .*6, 5.*3, 5"),
        (lambda: product(accumulate=True), "adds to memory that nothing has set"),
        (lambda: product(D=ones(3, 5), beta=0.5), "beta 0.5 has nothing to be applied to"),
        (lambda: product(bias=torch.ones(5)), "generic_gemm: bias is torch.float32"),
        (lambda: products(B=[gaps(3, 8)]), "te_general_grouped_gemm: B has strides"),
        (lambda: products(D=[ones(3, 5, dtype=torch.float16)]), "no product of torch.bfloat16 into torch.float16"),
        (lambda: products(D=[ones(5, 3)]), r"D\[0\] is \[5, 3\], expected \[3, 5\]"),
        (lambda: products(D=[torch.ones(3, 5)], single=True), "te_general_grouped_gemm: D is torch.float32"),
        (lambda: products(D=[ones(4, 5)], single=True), "D has 20 elements, the products have 15"),
        (lambda: norm(weight=torch.ones(8)), "rmsnorm_fwd: weight is torch.float32"),
        (lambda: norm(dtype=FLOAT), "no kernel from torch.bfloat16 into an output of torch.float32"),
        (lambda: norm(x=gaps(4, 8)), "rmsnorm_fwd: input has strides"),
        (lambda: norm_gradient(dz=torch.ones(4, 8)), "rmsnorm_bwd: dz is torch.float32"),
        (lambda: norm_gradient(add=torch.ones(4, 8)), "rmsnorm_bwd: add is torch.float32"),
        (lambda: layer_norm(torch.ones(8)), "layernorm_fwd: bias is torch.float32"),
        (lambda: softmax(1, 2, 8, 8, dtype=torch.float32), "scaled_softmax_forward: input is torch.float32"),
        (lambda: softmax(1, 2, 8, 12), "a multiple of 8 keys"),
        (lambda: softmax(1, 2, 1, 8), "at least 2 queries"),
        (lambda: softmax(x=gaps(1, 2, 8, 8)), "scaled_softmax_forward: input has strides"),
        (lambda: softmax(2, 2, 8, 8, mask=torch.ones(2, 2, 8, 8)), "the mask is"),
        (lambda: tex.scaled_upper_triang_masked_softmax_forward(ones(2, 8, 16), 1.0), "the input is"),
        (lambda: rope(ones(4, 1, 1, 8)), "fused_rope: freqs is torch.bfloat16"),
        (lambda: rope(torch.ones(4, 2, 1, 8)), "expected .positions, 1, 1, width."),
        (lambda: rope(torch.ones(4, 1, 1, 16)), "a head has width 8, and freqs have 16"),
        (lambda: permute(indices=torch.ones(4, 1, dtype=torch.int64)), "indices is torch.int64"),
        (lambda: permute(x=ones(4, 12)), "rows of 12 x torch.bfloat16"),
        (lambda: permute(x=gaps(4, 8)), "moe_permute_fwd: input has strides"),
        (lambda: unpermute(ones(4, 1)), "moe_unpermute_fwd: prob is torch.bfloat16"),
        (lambda: half(ends=ENDS.long()), "cu_seqlens is torch.int64"),
        (lambda: half(x=ones(10, 2, 3)), "the heads of a token are 6 x torch.bfloat16"),
        (lambda: half(x=gaps(10, 2, 4)), "thd_read_half_tensor: tensor has strides"),
        (lambda: out_correction(step=torch.ones(10, 2, 4)), "out_per_step is torch.float32"),
        (lambda: out_correction(lse=ones(2, 10)), "lse is torch.bfloat16"),
        (lambda: weight_gradient(16), "wgrad_gemm_accum_fp16: main_grad is torch.float32"),
        (lambda: weight_gradient(32, x=torch.ones(3, 8)), "grad_output is torch.bfloat16"),
        (lambda: weight_gradient(32, x=gaps(3, 8)), "wgrad_gemm_accum_fp32: input has strides"),
    ],
)
def test_what_the_kernel_refuses_or_misreads_is_refused(call, problem):
    with pytest.raises(RuntimeError, match=problem):
        call()


@pytest.mark.parametrize(
    "call", [product, products, norm, norm_gradient, permute, half, out_correction, lambda: weight_gradient(32)]
)
def test_the_same_calls_without_the_mistake_are_not(call):
    call()
