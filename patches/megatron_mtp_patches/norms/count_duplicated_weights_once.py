"""Declares count-duplicated-weights-once."""

from ..engine import Patch, Probe, PullRequest, Wrap

_LAYER = "megatron.core.extensions.transformer_engine:TELinear.__init__"

PATCH = Patch(
    id="count-duplicated-weights-once",
    summary="Count weights that each tensor-parallel rank has whole once in the norms",
    upstream=(PullRequest(3213, native_since="0.17.0"),),
    problem="TransformerEngine marks the weight of each linear layer as a shard, and Megatron 0.16 leaves this mark on "
    "layers of which each tensor-parallel rank has a copy: the down projections of multi-latent attention, and the "
    "projections of `--moe-latent-size`. The gradient norm, the number of zeros and the norm of the parameters "
    "count these weights once for each rank, and gradients are clipped too much.",
    adds=("`tensor_model_parallel` of these weights is False.",),
    numerics="With `--multi-latent-attention` or `--moe-latent-size` and TP > 1: the norms and the number of zeros "
    "shrink to those of one copy.",
    is_repair=True,
    probe=Probe(_LAYER, contains="setattr(param, 'tensor_model_parallel', False)"),
    edits=(Wrap(_LAYER, "megatron_overrides.norms.shard_marks:mark_duplicated_weights"),),
)
