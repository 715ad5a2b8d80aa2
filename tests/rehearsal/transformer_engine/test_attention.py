"""Attention: the fused path, which a GPU takes in 16 bits, and the unfused path in fp32."""

import pytest
import torch
from megatron_mtp_patches.rehearsal.transformer_engine import float32_attention
from torch.nn import functional as F

te = pytest.importorskip("transformer_engine.pytorch")
tex = pytest.importorskip("transformer_engine_torch")
pytestmark = pytest.mark.forked("torch")
LENGTH, BATCH, HEADS, WIDTH = 16, 2, 4, 8
PADDED_FROM = 10  # in the second sequence
ENDS = torch.arange(0, (BATCH + 1) * LENGTH, LENGTH, dtype=torch.int32)
PACKED = {"cu_seqlens_q": ENDS, "cu_seqlens_kv": ENDS, "max_seqlen_q": LENGTH, "max_seqlen_kv": LENGTH}


@pytest.fixture
def fused_calls(monkeypatch):
    """Records the layout of each call of the fused kernel."""
    calls = []
    forward = tex.fused_attn_fwd

    def count(*args):
        calls.append(next(str(arg.name) for arg in args if type(arg).__name__ == "NVTE_QKV_Layout"))
        return forward(*args)

    monkeypatch.setattr(tex, "fused_attn_fwd", count)
    return calls


def expected_attention(q, k, v, allowed):
    """Attention of [length, batch, heads, width] by torch's own function in fp32; 0 for a query that sees no key."""
    q, k, v = (one.float().permute(1, 2, 0, 3) for one in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    out = out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return out.permute(2, 0, 1, 3).flatten(2)


def seen(mask, padding=None, window=(-1, -1)):
    """Return [batch, 1, queries, keys]: whether a query sees a key."""
    at = torch.arange(LENGTH)
    allowed = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    if "causal" in mask or window[1] == 0:
        allowed &= at[None] <= at[:, None]
    if window[0] >= 0:
        allowed &= at[None] >= at[:, None] - window[0]
    if padding is not None:
        allowed &= ~padding & ~padding.transpose(-1, -2)
    return allowed


def make_inputs(dtype, kv_heads=HEADS):
    shapes = [(LENGTH, BATCH, heads, WIDTH) for heads in (HEADS, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["causal", "no_mask", "padding", "padding_causal"])
@pytest.mark.parametrize("kv_heads, window", [(4, (-1, -1)), (2, (-1, -1)), (4, (3, 0))], ids=["", "groups", "window"])
def test_dot_product_attention(dtype, mask, kv_heads, window, fused_calls, assert_same, assert_same_gradients):
    q, k, v = make_inputs(dtype, kv_heads)
    padding = None
    if "padding" in mask:
        padding = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
        padding[1, ..., PADDED_FROM:] = True
    settings = {"num_gqa_groups": kv_heads, "attn_mask_type": mask, "window_size": window}
    module = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0, qkv_format="sbhd", **settings)
    out = module(q, k, v, attention_mask=padding)
    assert len(fused_calls) == (dtype == torch.bfloat16)
    expected = expected_attention(q, k, v, seen(mask, padding, window))
    if padding is not None:  # the output at padding does not count
        keep = (~padding[:, 0, 0]).t()[..., None]
        out, expected = out * keep, expected * keep
    assert_same(out, expected, dtype)
    assert_same_gradients(out, expected, [q, k, v], dtype)


def test_float32_is_fused_where_it_is_allowed(fused_calls, monkeypatch, assert_same, assert_same_gradients):
    from transformer_engine.pytorch.attention.dot_product_attention import backends, utils

    monkeypatch.setattr(utils, "get_attention_backend", utils.get_attention_backend)
    monkeypatch.setattr(backends.FusedAttention, "forward", backends.FusedAttention.forward)
    float32_attention.allow()
    q, k, v = make_inputs(torch.float32)
    module = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0, qkv_format="sbhd")
    hidden = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).triu(-2)  # a causal mask reads no other
    out = module(q, k, v, attention_mask=hidden)
    assert len(fused_calls) == 1
    expected = expected_attention(q, k, v, seen("causal"))
    assert_same(out, expected)
    assert_same_gradients(out, expected, [q, k, v])


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_each_format_gives_the_same_attention(form, fused_calls, assert_same, assert_same_gradients):
    q, k, v = make_inputs(torch.bfloat16)
    inputs = [one if form == "sbhd" else one.transpose(0, 1).contiguous() for one in (q, k, v)]
    if form == "thd":
        inputs = [one.flatten(0, 1) for one in inputs]
    mask = "padding_causal" if form == "thd" else "causal"
    settings = {"qkv_format": form, "attn_mask_type": mask, "return_max_logit": True}
    module = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0, **settings)
    out, largest = module(*inputs, **(PACKED if form == "thd" else {}))
    assert len(fused_calls) == 1 and form.upper() in fused_calls[0]
    if form != "sbhd":
        out = out.view(BATCH, LENGTH, -1).transpose(0, 1)
    scores = torch.einsum("qbhw,kbhw->bhqk", q.float(), k.float()) / WIDTH**0.5
    assert_same(largest, scores.masked_fill(~seen("causal"), -torch.inf).amax((0, 2, 3)), torch.bfloat16)
    expected = expected_attention(q, k, v, seen("causal"))
    assert_same(out, expected, torch.bfloat16)
    assert_same_gradients(out, expected, [q, k, v], torch.bfloat16)


def test_a_bias_after_scaling(fused_calls, assert_same):
    q, k, v = make_inputs(torch.bfloat16)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16, requires_grad=True)
    module = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="no_mask")
    out = module(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    assert len(fused_calls) == 1
    heads_first = [one.float().permute(1, 2, 0, 3) for one in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=bias.float().expand(BATCH, -1, -1, -1))
    expected = expected.permute(2, 0, 1, 3).flatten(2)
    assert_same(out, expected, torch.bfloat16)
    grad = torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, bias, grad)
    (wanted,) = torch.autograd.grad(expected, bias, grad.float())
    assert_same(actual, wanted, torch.bfloat16)


def test_dropout_is_the_same_in_backward():
    """If the same probabilities are dropped, the gradient of the values is linear in that of the output."""
    q, k, v = make_inputs(torch.bfloat16)
    module = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.5, qkv_format="sbhd", attn_mask_type="causal")
    out = module(q, k, v)
    whole = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal")
    assert not torch.equal(out, whole(q, k, v))
    direction = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, v, direction)
    actual = (grad.float() * v.float()).sum()
    torch.testing.assert_close(actual, (out.float() * direction.float()).sum(), rtol=2e-2, atol=5e-1)


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
def test_a_softmax_with_one_more_score(kind, assert_same):
    """gpt-oss's sinks: the statistics count a score that has no value. TransformerEngine requires a newer device."""
    q, k, v = (one.detach() for one in make_inputs(torch.bfloat16))
    offset = torch.randn(1, HEADS, 1, 1) if kind == "learnable" else torch.zeros(1, HEADS, 1, 1)
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend, fused_attn_bwd, fused_attn_fwd

    how = {
        "qkv_layout": "sbhd_sbhd_sbhd",
        "attn_mask_type": "causal",
        "softmax_type": kind,
        "fused_attention_backend": FusedAttnBackend["F16_arbitrary_seqlen"],
    }
    out, aux = fused_attn_fwd(True, LENGTH, LENGTH, ENDS, ENDS, q, k, v, torch.bfloat16, softmax_offset=offset, **how)[
        :2
    ]
    leaves = [one.float().requires_grad_() for one in (q, k, v)] + [offset.clone().requires_grad_()]
    heads_first = [one.permute(1, 2, 0, 3) for one in leaves[:3]]
    scores = (heads_first[0] @ heads_first[1].transpose(-1, -2) / WIDTH**0.5).masked_fill(~seen("causal"), -torch.inf)
    with_offset = torch.cat((scores, leaves[3].expand(BATCH, HEADS, LENGTH, 1)), -1)
    expected = (torch.softmax(with_offset, -1)[..., :-1] @ heads_first[2]).permute(2, 0, 1, 3)
    assert_same(out, expected, torch.bfloat16)
    assert_same(aux[0], torch.logsumexp(with_offset, -1, keepdim=True))

    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, leaves, grad.float())
    names = fused_attn_bwd.__code__.co_varnames[: fused_attn_bwd.__code__.co_argcount]
    arguments = {
        **PACKED,
        "q": q,
        "k": k,
        "v": v,
        "o": out,
        "d_o": grad,
        "fake_dtype": torch.bfloat16,
        "dqkv_dtype": tex.DType.kBFloat16,
        "aux_ctx_tensors": aux,
        "dqkv_layout": "sbhd_sbhd_sbhd",
        **how,
    }
    actual = fused_attn_bwd(**{name: value for name, value in arguments.items() if name in names})
    for one, other in zip([*actual[:3], actual[4]], wanted, strict=True):
        assert_same(one, other, torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        {"q_dtype": 4, "kv_dtype": 4},
        {"bias_type": "NVTE_ALIBI"},
        {"qkv_layout": "NVTE_Paged_KV_SBHD_SBHD_SBHD"},
        {"head_dim_qk": 12},
    ],
    ids=str,
)
def test_the_kernel_says_what_it_does_not_support(change):
    asked = {
        "is_training": True,
        "q_dtype": int(tex.DType.kBFloat16),
        "kv_dtype": int(tex.DType.kBFloat16),
        "qkv_layout": "NVTE_SBHD_SBHD_SBHD",
        "bias_type": "NVTE_NO_BIAS",
        "attn_mask_type": "NVTE_CAUSAL_MASK",
        "softmax_type": "NVTE_VANILLA_SOFTMAX",
        "p_dropout": 0.0,
        "num_attn_heads": 4,
        "num_gqa_groups": 2,
        "max_seqlen_q": 16,
        "max_seqlen_kv": 16,
        "head_dim_qk": 16,
        "head_dim_v": 16,
    }
    enums = {
        "qkv_layout": tex.NVTE_QKV_Layout,
        "bias_type": tex.NVTE_Bias_Type,
        "attn_mask_type": tex.NVTE_Mask_Type,
        "softmax_type": tex.NVTE_Softmax_Type,
    }

    def answer(asked):
        values = [enums[name][value] if name in enums else value for name, value in asked.items()]
        return tex.get_fused_attn_backend(*values, -1, -1, False, False, False).name

    assert answer(asked) == "NVTE_F16_arbitrary_seqlen"
    assert answer({**asked, **change}) == "NVTE_No_Backend"
