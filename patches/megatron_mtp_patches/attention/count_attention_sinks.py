"""Declares count-attention-sinks."""

from ..engine import Patch, PullRequest, Wrap

_MARK = "megatron_overrides.attention.sinks:mark_attention_sinks"

PATCH = Patch(
    id="count-attention-sinks",
    summary="Count the learnable attention sinks of all tensor-parallel ranks in the gradient norm",
    upstream=(PullRequest(7530),),
    problem="With `--softmax-type learnable` each tensor-parallel rank has the sinks of its own heads, but they are "
    "not marked as shards. The gradient norm, the number of zeros and the norm of the parameters count those of the "
    "first rank only, so gradients are clipped slightly too little. Upstream's main has the same defect.",
    adds=("`softmax_offset` has `tensor_model_parallel`, `partition_dim` and `partition_stride`, as weights have.",),
    numerics="With learnable sinks and TP > 1: the norms and the number of zeros grow to those of all sinks.",
    is_repair=True,
    edits=(
        Wrap("megatron.core.transformer.dot_product_attention:DotProductAttention.__init__", _MARK),
        Wrap("megatron.core.extensions.transformer_engine:TEDotProductAttention.__init__", _MARK),
    ),
)
