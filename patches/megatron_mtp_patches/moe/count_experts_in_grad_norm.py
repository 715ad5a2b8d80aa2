"""Declares count-experts-in-grad-norm."""

from ..engine import Override, Patch, Probe, PullRequest, Wrap

_LAYERS = "megatron.core.tensor_parallel.layers"
_WRAPPERS = "megatron_overrides.moe.expert_parameters"
_SHARE_OUT = "megatron_overrides.moe.expert_shares:share_out_experts"
_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer"
_IS_COUNTED = "megatron_overrides.norms.replicas:param_is_not_tensor_parallel_duplicate"
_TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"

PATCH = Patch(
    id="count-experts-in-grad-norm",
    summary="Count all gradients of experts in the gradient norm, and train replicas of an expert alike",
    upstream=(PullRequest(6099, native_since="main"), PullRequest(5916, native_since="0.19.0")),
    problem="With tensor parallelism, grouped experts and TransformerEngine 2.13 or newer, the gradient norm leaves "
    "out the experts of all tensor-parallel ranks but the first (0.16 to 0.18). Gradients are then clipped less than "
    "asked for, and nothing in the log shows it. The number of zeros and the norm of the parameters leave them out "
    "as well. Biases of experts are left out with any TransformerEngine and, in dist_muon, also in 0.19.2. If EP is "
    "1 and experts are split over another number of ranks than dense layers, their gradients are averaged over the "
    "wrong ranks (0.16 to 0.18): with TP 2 and ETP 1 each tensor-parallel rank trains a different copy of the same "
    "expert, with TP 1 and ETP 2 the gradients of different shards are mixed. Layer-wise optimizers (dist_muon) share "
    "out nothing where dense layers have one replica. If experts have several, each of them counts in the norm and in "
    "the number of zeros, and saving the optimizer in the format torch_dist ends in an error.",
    adds=(
        "The parameters of experts are marked as 0.19 marks them: `tensor_model_parallel`, `partition_dim` and "
        "`partition_stride` on shards; `allreduce` is false if the gradients of experts are reduced over other ranks "
        "than those of dense layers. The linear layers mark them, Megatron's and TransformerEngine's, so experts that "
        "no `MoELayer` has built are also marked: adapters added later, layers of other libraries.",
        "`param_is_not_tensor_parallel_duplicate` takes `expert_tp_group`.",
        "The ranks that hold replicas of an expert share out the experts in layer-wise optimizers, also where dense "
        "layers have one replica. Each rank has the optimizer state of its share.",
    ),
    repairs=(
        "On main layer-wise optimizers count each expert once for each of its replicas, where dense layers have one "
        "(norm-of-unsharded-experts). With this patch the norm and the number of zeros count it once.",
    ),
    numerics="With TP > 1 and experts: the gradient norm, the MTP norm, the number of zeros and the norm of the "
    "parameters grow to those of all experts, and gradients above `--clip-grad` are clipped more. In layer-wise "
    "optimizers the first three fall to those of all experts where each was counted more than once. With EP 1 and an "
    "expert tensor parallelism other than TP, gradients of experts are averaged over all replicas. Muon with "
    "`--muon-tp-mode` other than blockwise puts the shards of an expert together along the right dimension.",
    notes=(
        "Checkpoints: with EP 1 and an expert tensor parallelism other than TP, the optimizer state of experts is in "
        "other buffers with the patch than without it (as in 0.19). A checkpoint of the distributed optimizer from the "
        "one side cannot be resumed on the other: loading ends in a KeyError, or with "
        "`--dist-ckpt-optim-fully-reshardable` in a RuntimeError. `--no-load-optim` loads it, or leave the patch out "
        "until the run ends.",
        "Checkpoints of layer-wise optimizers without data and context parallelism, where experts have replicas: each "
        "rank has the state of its share of experts with the patch, and of all experts without it (saved only in the "
        "format torch). A checkpoint from the one side cannot be resumed on the other: loading ends in an error. "
        "`--no-load-optim` loads it, or leave the patch out until the run ends.",
    ),
    is_repair=True,
    probe=Probe(
        f"{_LAYER_WISE}.__init__",
        contains="getattr(self.pg_collection, 'expt_tp', self.tp_group)",
    ),
    edits=(
        Wrap("megatron.core.transformer.moe.moe_layer:MoELayer.__init__", f"{_WRAPPERS}:mark_experts_of_layer"),
        *(
            Wrap(f"{module}:{layer}.__init__", f"{_WRAPPERS}:mark_experts_of_{kind}_layer", check_source=False)
            for module, prefix in ((_LAYERS, ""), (_TRANSFORMER_ENGINE, "TE"))
            for kind, layer in (("column", f"{prefix}ColumnParallelLinear"), ("row", f"{prefix}RowParallelLinear"))
        ),
        *(
            Wrap(f"{_TRANSFORMER_ENGINE}:{layer}.__init__", f"{_WRAPPERS}:mark_experts_of_linear", check_source=False)
            for layer in ("TELinear", "TEGroupedLinear")
        ),
        Override(f"{_LAYERS}:param_is_not_tensor_parallel_duplicate", _IS_COUNTED, where="everywhere"),
        Wrap(f"{_LAYERS}:copy_tensor_model_parallel_attributes", f"{_WRAPPERS}:copy_expert_mark", check_source=False),
        Wrap(f"{_LAYER_WISE}.shard_params", _SHARE_OUT),
    ),
)
