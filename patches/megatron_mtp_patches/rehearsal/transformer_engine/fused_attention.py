"""cuDNN's fused attention, which TransformerEngine uses on a GPU: with it a rehearsal takes the same code path.

Source: TransformerEngine's attention.cpp and fused_attn.h (2.12, 2.14 and 2.16 to 2.18), and cuDNN's definition of the
statistics: the logarithm of the sum of the exponentials of a query's scores. Backward takes the statistics and the
output as arguments, because ring attention (context parallelism) passes those of the whole sequence.

Queries, keys and values are sbhd, bshd or thd, in bf16 or fp16. The computation is in fp32 and rounds once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from . import version
from .enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from .kernel import quantized, refusal

STATISTICS_WITH_GREATEST = Version("2.14")  # the first TransformerEngine that takes both from the kernel
EMPTY = -1e30  # the statistics of a query that sees no key; finite, so that ring attention can subtract them

_FORWARD = (
    "max_seqlen_q max_seqlen_kv is_training attn_scale p_dropout set_zero qkv_layout {formats} bias_type mask_type "
    "softmax_type window_size bottom_right_diagonal cu_seqlens_q cu_seqlens_kv q k v fake_dtype cu_seqlens_q_padded "
    "cu_seqlens_kv_padded page_table_k page_table_v s_quantizer o_quantizer bias softmax_offset rng_gen "
    "rng_elts_per_thread return_max_logit cuda_graph"
)
_BACKWARD = (
    "max_seqlen_q max_seqlen_kv attn_scale p_dropout set_zero qkv_layout {formats} bias_type mask_type softmax_type "
    "window_size bottom_right_diagonal deterministic cu_seqlens_q cu_seqlens_kv q k v o d_o fake_dtype {dtype} aux "
    "cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer dqkv_quantizer cuda_graph"
)


def get_fused_attn_backend(
    is_training: bool,
    q_dtype: Any,
    kv_dtype: Any,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    p_dropout: float,
    num_attn_heads: int,
    num_gqa_groups: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    head_dim_v: int,
    *_: Any,
) -> Any:
    """Return NVTE_F16_arbitrary_seqlen, as on a Hopper, if `fused_attn_fwd` supports it; else NVTE_No_Backend."""
    is_supported = (
        DType(int(q_dtype)) == DType(int(kv_dtype)) in (DType.kFloat16, DType.kBFloat16)
        and bias_type in (NVTE_Bias_Type["NVTE_NO_BIAS"], NVTE_Bias_Type["NVTE_POST_SCALE_BIAS"])
        and "Paged" not in NVTE_QKV_Layout(int(qkv_layout)).name
        and "BHSD" not in NVTE_QKV_Layout(int(qkv_layout)).name
        and head_dim_qk % 8 == 0
        and head_dim_v % 8 == 0
        and num_attn_heads % num_gqa_groups == 0
    )
    return NVTE_Fused_Attn_Backend["NVTE_F16_arbitrary_seqlen" if is_supported else "NVTE_No_Backend"]


@dataclass
class _Call:
    """Values that forward and backward share: the places of the tokens, the scores that count, and their scale."""

    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        arguments = self.arguments
        for name in ("s_quantizer", "o_quantizer", "dp_quantizer", "dqkv_quantizer"):
            quantized(arguments["q"], arguments.get(name))
        if arguments.get("page_table_k") is not None:
            refusal("fused_attn_fwd with a paged cache")()
        self.q_format, self.kv_format = _formats(NVTE_QKV_Layout(int(arguments["qkv_layout"])).name)
        mask = str(NVTE_Mask_Type(int(arguments["mask_type"])).name)
        self.has_padding, self.is_causal, self.from_the_end = (
            word in mask for word in ("PADDING", "CAUSAL", "BOTTOM_RIGHT")
        )
        self.q_spans = _spans(arguments, "q", self.q_format, self.has_padding)
        self.kv_spans = _spans(arguments, "kv", self.kv_format, self.has_padding)
        self.scale = float(arguments["attn_scale"])

    def take(self, tensor: Tensor, spans: list[tuple[int, int]], form: str) -> Tensor:
        """Return [batch, heads, longest, width] in fp32, padded with zeros."""
        if form != "thd":
            dense = tensor.permute(1, 2, 0, 3) if form == "sbhd" else tensor.permute(0, 2, 1, 3)
            return dense.float()
        out = tensor.new_zeros(
            len(spans), max([n for _, n in spans], default=0), *tensor.shape[-2:], dtype=torch.float32
        )
        for i, (begin, length) in enumerate(spans):
            out[i, :length] = tensor[begin : begin + length]
        return out.permute(0, 2, 1, 3)

    def put(self, dense: Tensor, like: Tensor, spans: list[tuple[int, int]], form: str) -> Tensor:
        """Reverse take() into a new tensor. Tokens that belong to no sequence are 0."""
        if form != "thd":
            value = dense.permute(2, 0, 1, 3) if form == "sbhd" else dense.permute(0, 2, 1, 3)
            return value.to(like.dtype).contiguous()
        out = torch.zeros(*like.shape[:-1], dense.shape[-1], dtype=like.dtype)
        for i, (begin, length) in enumerate(spans):
            out[begin : begin + length] = dense[i, :, :length].transpose(0, 1)
        return out

    def allowed(self, queries: int, keys: int) -> Tensor:
        """Return [batch, 1, queries, keys]: whether a query sees a key."""
        q_lengths = torch.tensor([length for _, length in self.q_spans]).view(-1, 1, 1)
        kv_lengths = torch.tensor([length for _, length in self.kv_spans]).view(-1, 1, 1)
        query, key = torch.arange(queries).view(1, -1, 1), torch.arange(keys).view(1, 1, -1)
        from_the_end = self.from_the_end or (not self.is_causal and self.arguments["bottom_right_diagonal"])
        diagonal = query + (kv_lengths - q_lengths if from_the_end else 0)
        visible = (query < q_lengths) & (key < kv_lengths)
        left, right = self.arguments["window_size"]
        if left >= 0:
            visible = visible & (key >= diagonal - left)
        if self.is_causal or right >= 0:
            visible = visible & (key <= diagonal + (0 if self.is_causal else right))
        return visible[:, None]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return [batch, heads, queries, keys], -inf where a query does not see the key."""
        value = q @ k.transpose(-1, -2) * self.scale
        if self.bias is not None:
            value = value + self.bias.float()
        return value.masked_fill(~self.allowed(*value.shape[-2:]), -math.inf)

    @property
    def bias(self) -> Tensor | None:
        has_bias = self.arguments["bias_type"] == NVTE_Bias_Type["NVTE_POST_SCALE_BIAS"]
        return self.arguments["bias"] if has_bias else None

    @property
    def offset(self) -> Tensor | None:
        """[1, heads, 1, 1]: a score that each query has in addition to those of its keys, or None."""
        kind = self.arguments["softmax_type"]
        if kind == NVTE_Softmax_Type["NVTE_VANILLA_SOFTMAX"]:
            return None
        offset = self.arguments["softmax_offset"]
        return torch.zeros(1, 1, 1, 1) if offset is None else offset.float()

    def dropout_factors(self, shape: torch.Size, rng_state: Tensor) -> Tensor | float:
        """Return the factors by which dropout multiplies the probabilities. The same state gives the same factors."""
        p = float(self.arguments["p_dropout"])
        if p == 0.0:
            return 1.0
        generator = torch.Generator().manual_seed(int(rng_state[0]))
        return (torch.rand(shape, generator=generator) >= p).float() / (1 - p)


def _formats(layout: str) -> tuple[str, str]:
    """Return the formats of queries, and of keys and values: "sbhd", "bshd" or "thd".

    A digit in `layout` is the number of interleaved tensors.
    """
    parts = [re.sub(r"\d", "", part) for part in layout.removeprefix("NVTE_").lower().split("_")]
    return parts[0], parts[-1]


def _spans(arguments: dict[str, Any], which: str, form: str, has_padding: bool) -> list[tuple[int, int]]:
    """Return (first token, length) of each sequence; in dense formats the first token is 0."""
    cu_seqlens = arguments[f"cu_seqlens_{which}"].tolist()
    lengths = [end - begin for begin, end in zip(cu_seqlens, cu_seqlens[1:], strict=False)]
    if form == "thd":
        padded = arguments[f"cu_seqlens_{which}_padded"]
        begins = cu_seqlens if padded is None else padded.tolist()
        return list(zip(begins, lengths, strict=False))
    tensor = arguments["q" if which == "q" else "k"]
    batch, length = (tensor.shape[1], tensor.shape[0]) if form == "sbhd" else tensor.shape[:2]
    return [(0, lengths[i] if has_padding else length) for i in range(batch)]


def _expand(kv: Tensor, heads: int) -> Tensor:
    """Repeat heads of keys and values for grouped queries: each serves several heads of queries."""
    return kv.repeat_interleave(heads // kv.shape[1], 1)


def _reduce(grad: Tensor, kv_heads: int) -> Tensor:
    return grad.unflatten(1, (kv_heads, -1)).sum(2)


def fused_attn_fwd(*args: Any) -> list[Any]:
    """Return [output, statistics, (greatest scores), rng state, (bias), (softmax offset)].

    Statistics and greatest scores are fp32, [batch, heads, queries, 1]; for thd they are [tokens, heads, 1]. With
    return_max_logit, TransformerEngine before 2.14 expects the greatest scores and, in the place of the statistics, the
    sum of the exponentials of what the scores are less: [output, greatest scores, sums, rng state, ...].
    """
    formats = "o_format qkv_scale_inv_format" if isinstance(args[7], NVTE_QKV_Format) else ""
    call = _Call(dict(zip(_FORWARD.format(formats=formats).split(), args, strict=True)))
    arguments = call.arguments
    q = call.take(arguments["q"], call.q_spans, call.q_format)
    k, v = (_expand(call.take(arguments[one], call.kv_spans, call.kv_format), q.shape[1]) for one in "kv")
    scores = call.scores(q, k)
    with_offset = scores
    if call.offset is not None:
        with_offset = torch.cat((scores, call.offset.expand(*scores.shape[:-1], 1)), -1)
    statistics = torch.logsumexp(with_offset, -1, keepdim=True).clamp(min=EMPTY)
    rng_state = torch.tensor([int(torch.randint(2**31, ())) if arguments["p_dropout"] else 0, 0])
    probabilities = torch.exp(scores - statistics)
    out = (probabilities * call.dropout_factors(scores.shape, rng_state)) @ v
    greatest = scores.amax(-1, keepdim=True)
    if not arguments["return_max_logit"]:
        kept = [statistics]
    elif Version(version()) < STATISTICS_WITH_GREATEST:
        greatest = greatest.clamp(min=EMPTY)
        kept = [greatest, torch.exp(statistics - greatest)]
    else:
        kept = [statistics, greatest]
    results = [call.put(out, arguments["q"], call.q_spans, call.q_format), *(_stored(call, one) for one in kept)]
    results.append(rng_state)
    return results + [tensor for tensor in (call.bias, arguments["softmax_offset"]) if tensor is not None]


def _stored(call: _Call, statistics: Tensor) -> Tensor:
    """Return the statistics in the layout of the caller: for thd, by token."""
    if call.q_format != "thd":
        return statistics
    like = call.arguments["q"].float()[..., :1]
    return call.put(statistics, like, call.q_spans, "thd")


def fused_attn_bwd(*args: Any) -> list[Any]:
    """Return the gradients of q, k, v, bias and softmax offset; the last two may be None."""
    has_formats = isinstance(args[6], NVTE_QKV_Format)
    formats = "o_format do_format dqkv_layout qkv_scale_inv_format do_scale_inv_format" if has_formats else ""
    names = _BACKWARD.format(formats=formats, dtype="" if has_formats else "dqkv_type").split()
    arguments = dict(zip(names, args, strict=True))
    statistics, rng_state, *rest = arguments["aux"]
    arguments["bias"] = arguments["softmax_offset"] = None
    if arguments["bias_type"] == NVTE_Bias_Type["NVTE_POST_SCALE_BIAS"]:
        arguments["bias"], *rest = rest
    if rest:
        (arguments["softmax_offset"],) = rest
    call = _Call(arguments)
    q, out, d_out = (call.take(arguments[one], call.q_spans, call.q_format) for one in ("q", "o", "d_o"))
    kv_heads = arguments["k"].shape[-2]
    k, v = (_expand(call.take(arguments[one], call.kv_spans, call.kv_format), q.shape[1]) for one in "kv")
    if call.q_format == "thd":
        statistics = call.take(statistics, call.q_spans, "thd")
    scores = call.scores(q, k)
    probabilities = torch.exp(scores - statistics)
    dropout = call.dropout_factors(scores.shape, rng_state)
    d_v = (probabilities * dropout).transpose(-1, -2) @ d_out
    share = (d_out * out).sum(-1, keepdim=True)
    d_scores = probabilities * (d_out @ v.transpose(-1, -2) * dropout - share)
    d_q = d_scores @ k * call.scale
    d_k = d_scores.transpose(-1, -2) @ q * call.scale
    grads: list[Any] = [call.put(d_q, arguments["q"], call.q_spans, call.q_format)]
    for grad, one in ((d_k, "k"), (d_v, "v")):
        grads.append(call.put(_reduce(grad, kv_heads), arguments[one], call.kv_spans, call.kv_format))
    grads.append(None if call.bias is None else d_scores.sum_to_size(call.bias.shape).to(call.bias.dtype))
    d_offset = None
    if call.offset is not None:
        d_offset = (-torch.exp(call.offset - statistics) * share).sum((0, 2, 3), keepdim=True)
    return [*grads, d_offset]


KERNELS = (get_fused_attn_backend, fused_attn_fwd, fused_attn_bwd)
