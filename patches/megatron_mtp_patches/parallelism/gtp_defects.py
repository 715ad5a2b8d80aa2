"""Generalized tensor parallelism (GTP), which shards each weight over more ranks than its product."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import expert_tensor_parallel, pipeline_parallel, tensor_parallel
from ..defects.declare import Defect, Sign

_GTP = "megatron.core.tensor_parallel.generalized_tensor_parallelism"
_LAYERS = "megatron.core.tensor_parallel.layers"
_DENSE = "--tensor-parallel-num-weight-shards greater than --tensor-model-parallel-size"
_FLAG = f"{_DENSE}, or --expert-tensor-parallel-num-weight-shards than --expert-tensor-parallel-size"
_INSTEAD = "leave out --tensor-parallel-num-weight-shards and --expert-tensor-parallel-num-weight-shards"
_NOT_DENSE = "leave out --tensor-parallel-num-weight-shards"
_WITH_GRAPHS = "--cuda-graph-impl local or transformer_engine"
# In 0.19 others end in the error of ML-6242.
_GRAPHS_HOLD_DECODER = "CUDA graphs capture all dense weights of the decoder"


def _weight_shards(run: Any) -> int:
    """Over how many ranks each shard of a dense weight is split again."""
    return run.gtp_weight_remat_size or 1


def _has_gtp(run: Any) -> bool:
    return _weight_shards(run) > 1 or (run.expert_gtp_weight_remat_size or 1) > 1


def _captures_layers(run: Any) -> bool:
    """True if CUDA graphs capture parts of layers, which splits the order in which weights are gathered."""
    return run.cuda_graph_impl in ("local", "transformer_engine")


def _is_tied(run: Any) -> bool:
    """True if the output layer of one stage has the weight of the word embeddings."""
    return pipeline_parallel(run) == 1 and run.untie_embeddings_and_output_weights is False


DEFECTS = (
    Defect(
        id="ML-6080",
        effect="Experts count as dense weights: their gradients are summed, and with --use-distributed-optimizer their "
        "weights gathered, over the ranks that have copies of dense weights, not over those that have copies of a part "
        "of an expert, so parts of an expert are mixed, or copies of one drift apart",
        severity=5,
        signs=Sign(
            "megatron.core.extensions.transformer_engine:TELinear.__init__",
            has="gtp",
            lacks="expert_gtp_weight_remat_size != self.config.gtp_weight_remat_size",
        ),
        affects=lambda run: (
            run.num_experts
            and (run.expert_model_parallel_size or 1) == 1
            and expert_tensor_parallel(run) == tensor_parallel(run)
            and 1 < (run.expert_gtp_weight_remat_size or 1) != _weight_shards(run)
        ),
        when="--num-experts with --expert-model-parallel-size 1, --expert-tensor-parallel-size as large as "
        "--tensor-model-parallel-size, and --expert-tensor-parallel-num-weight-shards greater than these and other "
        "than --tensor-parallel-num-weight-shards",
        instead="give both the same number of weight shards",
        state="fixed on main",
        evidence="read",
        seen_by="copies",
        second_reading="TransformerEngine's layers and the groups of ranks of 0.19.0 and main; what validates shards; "
        "doctor with equal and unequal numbers of shards; a run of 0.19.2 with shards of dense weights alone, which is "
        "right; what 0.16.1 makes of two experts in one buffer of the distributed optimizer; the scale of severities",
    ),
    Defect(
        id="ML-6207",
        effect="A weight and the next one are gathered into one buffer, so a layer may compute with the weights of the "
        "next one",
        severity=4,
        signs=Sign(
            f"{_GTP}:GTPShardedParam",
            has="prev_w",
            lacks=("_ensure_distinct_buffer_from_prev", "_ensure_no_shared_buffer_with"),
        ),
        affects=lambda run: _weight_shards(run) > 1,
        when=_DENSE,
        only_if="two weights of one shape follow each other, as the embedding and the output layer with CUDA graphs, "
        "or where layers are recomputed",
        instead=_NOT_DENSE,
        more_links=("NVIDIA/Megatron-LM#6407",),
        state="fixed on main",
        evidence="reproduced",
        second_reading="which buffers weights of 0.19.0 and main are gathered into, in forward passes and in "
        "recomputation; 0.19.2 on one process in place of two, with two weights of one shape; "
        "doctor with shards of dense weights and of experts alone",
    ),
    Defect(
        id="ML-6388",
        effect="A weight may be prefetched before its data-parallel all-gather has ended, so a layer may compute with "
        "the weights of the step before",
        severity=4,
        signs=Sign(
            "megatron.core.distributed.distributed_data_parallel:", has="gtp", lacks="class _BucketParamReadyCallback"
        ),
        affects=lambda run: _has_gtp(run) and run.overlap_param_gather,
        when=f"{_FLAG}, with --overlap-param-gather",
        only_if="the all-gather ends too late (a race)",
        instead="leave out --overlap-param-gather",
        state="fixed on main",
        evidence="read",
        second_reading="DDP's hooks and the prefetching of 0.19.0 and main; doctor with and without overlap",
    ),
    Defect(
        id="ML-6242",
        effect="The first backward pass ends in a KeyError: None, because the embedding, which MTP layers or a tied "
        "output layer use once more, breaks the order in which weights are gathered and gradients summed",
        kind="crash",
        severity=3,
        signs=Sign(f"{_GTP}:GTPShardedParam", has="prev_w", lacks="_prefetch_available"),
        affects=lambda run: (
            _weight_shards(run) > 1 and (run.mtp_num_layers or _is_tied(run)) and not _captures_layers(run)
        ),
        when=f"{_DENSE}, with --mtp-num-layers, or without --untie-embeddings-and-output-weights and pipeline "
        f"parallelism, and without {_WITH_GRAPHS}",
        only_if="a pipeline stage has an MTP layer beside decoder layers or other MTP layers, or embeddings are tied",
        instead=_NOT_DENSE,
        state="fixed on main",
        evidence="reproduced",
        second_reading="the prefetching of 0.19.0 and main, forward and backward; 0.19.2 on one process in place of "
        "two, with MTP layers and tied embeddings on one stage and several, also with MTP layers alone on a stage; "
        "doctor just outside",
    ),
    Defect(
        id="ML-6565",
        effect="A placeholder whose memory is not set to zero is added to the gradient of the word embeddings, which "
        "gets whatever that memory holds",
        severity=3,
        signs=Sign(
            f"{_GTP}:GTPShardedParam",
            has="get_dummy_wgrad(list(param.main_grad.shape), param.dtype)",
            lacks="get_dummy_wgrad(list(param.main_grad.shape), param.dtype, zero=True)",
        ),
        affects=lambda run: (
            _weight_shards(run) > 1
            and pipeline_parallel(run) == 1
            and (run.mtp_num_layers or _is_tied(run))
            and _captures_layers(run)
        ),
        when=f"{_DENSE}, with {_WITH_GRAPHS}, without pipeline parallelism, and with --mtp-num-layers or without "
        "--untie-embeddings-and-output-weights",
        only_if=f"{_GRAPHS_HOLD_DECODER}, and a step has several microbatches",
        instead=_NOT_DENSE,
        state="fixed on main",
        evidence="reproduced",
        second_reading="what 0.19.0 and main hand to autograd for a shard, DDP's hook, and where embeddings ask for "
        "zeros; 0.19.2 on one process in place of two, with one microbatch and two; doctor just outside",
    ),
    Defect(
        id="ML-6624",
        effect="Gradients of the output layer, and of other linear layers of Megatron's own, are rounded to half "
        "precision before they are summed over ranks, though the run accumulates and reduces in fp32",
        severity=3,
        signs=Sign(
            f"{_LAYERS}:LinearWithGradAccumulationAndAsyncCommunication.backward",
            has="gtp_remat_size",
            lacks="_wgrad_gemm",
        ),
        affects=lambda run: (
            _weight_shards(run) > 1
            and (run.bf16 or run.fp16)
            and (run.accumulate_allreduce_grads_in_fp32 or run.grad_reduce_in_fp32)
        ),
        when=f"{_DENSE}, with --bf16, or with --fp16 and --accumulate-allreduce-grads-in-fp32, without "
        "--grad-reduce-in-bf16",
        instead=_NOT_DENSE,
        state="fixed on main",
        evidence="read",
        second_reading="linear layers of 0.19.0 and main, and the dtype of the buffer for a gradient; doctor with "
        "weight shards in bf16 and fp16, and with --grad-reduce-in-bf16",
    ),
    Defect(
        id="ML-6717",
        effect="The loss of an evaluation is the mean over a part of its samples: over one of the ranks that share out "
        "a weight, though each has samples of its own",
        kind="wrong log",
        severity=2,
        signs=Sign(
            "megatron.training.training:evaluate", has="torch.distributed.all_reduce(val, group=eval_pgc.dp_cp)"
        ),
        affects=lambda run: _weight_shards(run) > 1 and run.eval_iters,
        when=f"{_DENSE}, with --eval-iters > 0",
        instead=_NOT_DENSE,
        state="fixed on main",
        evidence="read",
        second_reading="evaluation, and the groups that train_step uses, of 0.19.0 and main; doctor with weight shards",
    ),
    Defect(
        id="ML-6740",
        effect="Muon scales the update of a padded weight as if the zeros that pad it were rows of it",
        severity=2,
        signs=Sign(
            "megatron.core.optimizer.emerging_optimizers:TensorParallelMuon", has="gtp_remat", lacks="_strip_pad"
        ),
        affects=lambda run: _has_gtp(run) and "muon" in str(run.optimizer),
        when=f"{_FLAG}, with --optimizer muon, dist_muon or adaptive_muon",
        only_if="weights are padded, because their rows do not divide evenly",
        instead=_INSTEAD,
        state="fixed on main, but for --muon-tp-mode distributed",
        evidence="read",
        second_reading="Muon of 0.19.0 and main in each mode; how weights are padded; doctor with muon and dist_muon",
    ),
    Defect(
        id="ML-6775",
        effect="Which ranks write a shard of a checkpoint is decided in Megatron's global groups, so with groups of "
        "your own shards may be missing",
        kind="lost state",
        severity=3,
        signs=Sign(
            f"{_LAYERS}:ColumnParallelLinear.__init__", has='wrap_module_params_gtp(self, ["weight"], gtp_remat_group)'
        ),
        affects=lambda run: _has_gtp(run) and run.save and run.ckpt_format != "torch",
        when=f"{_FLAG}, with --save and without --ckpt-format torch",
        only_if="the model is built with process groups of its own (pg_collection)",
        instead=_INSTEAD,
        state="fixed on main",
        evidence="read",
        second_reading="who writes a shard in 0.19.0 and on main, and the groups that layers get",
    ),
    Defect(
        id="ML-6242b",
        effect="In each microbatch the output layer keeps the gradient of one depth only, and loses those of the main "
        "loss and of other depths, because the reduce-scatter of one use overwrites that of the use before",
        severity=3,
        signs=Sign(
            f"{_GTP}:GTPShardedParam.wgrad_reduce_scatter",
            lacks="if GTP_CONFIG.async_reduction and self._wgrad_rs_handle is not None",
        ),
        affects=lambda run: (
            _weight_shards(run) > 1
            and run.mtp_num_layers
            and run.untie_embeddings_and_output_weights is not False
            and _captures_layers(run)
        ),
        when=f"{_DENSE}, with --mtp-num-layers, --untie-embeddings-and-output-weights and {_WITH_GRAPHS}",
        only_if=_GRAPHS_HOLD_DECODER,
        more_links=("NVIDIA/Megatron-LM#6242",),
        instead=_NOT_DENSE,
        state="fixed on main",
        evidence="reproduced",
        second_reading="the reduce-scatter of 0.19.0 and main, and who adds its result up; 0.19.2 on one process in "
        "place of two; doctor just outside",
    ),
)
