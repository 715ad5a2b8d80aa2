"""Declares count-uninitialized-shards."""

from ..engine import Patch, Probe, PullRequest, Wrap

_LAYERS = "megatron.core.tensor_parallel.layers"

PATCH = Patch(
    id="count-uninitialized-shards",
    summary="Count the weights of all tensor-parallel ranks in the norms of a model that is not initialized",
    upstream=(PullRequest(4084, native_since="0.18.0"),),
    problem="With `--no-initialization` (`perform_initialization=False`) Megatron's embedding and linear layers do not "
    "mark their weights as shards on 0.16 and 0.17. The gradient norm, the number of zeros and the norm of the "
    "parameters count those of the first tensor-parallel rank only, and gradients are clipped too little. With the "
    "local implementation these are all linear layers, else the embedding and the output layer. Muon "
    "orthogonalizes such shards as if they were whole matrices.",
    adds=("Weights have `tensor_model_parallel`, `partition_dim` and `partition_stride`, initialized or not.",),
    numerics="With `--no-initialization` and TP > 1: the norms and the number of zeros grow to those of all ranks.",
    is_repair=True,
    probe=Probe(f"{_LAYERS}:VocabParallelEmbedding.__init__", contains="set_tensor_model_parallel_attributes"),
    edits=tuple(
        Wrap(f"{_LAYERS}:{layer}.__init__", f"megatron_overrides.norms.shard_marks:mark_uninitialized_{kind}")
        for layer, kind in (
            ("VocabParallelEmbedding", "rows"),
            ("ColumnParallelLinear", "rows"),
            ("RowParallelLinear", "columns"),
        )
    ),
)
