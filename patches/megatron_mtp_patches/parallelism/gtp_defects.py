"""Generalized tensor parallelism (GTP), which shards each weight over more ranks than its product."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import expert_tensor_parallel, pipeline_parallel, repeats_a_head, tensor_parallel
from ..defects.declare import Defect, Sign

_GTP = "megatron.core.tensor_parallel.generalized_tensor_parallelism"
_LAYERS = "megatron.core.tensor_parallel.layers"
_DENSE = "--tensor-parallel-num-weight-shards greater than --tensor-model-parallel-size"
_FLAG = f"{_DENSE}, or --expert-tensor-parallel-num-weight-shards than --expert-tensor-parallel-size"
_INSTEAD = "leave out --tensor-parallel-num-weight-shards and --expert-tensor-parallel-num-weight-shards"


def _weight_shards(run: Any) -> int:
    """Over how many ranks each shard of a dense weight is split again."""
    return run.gtp_weight_remat_size or 1


def _has_gtp(run: Any) -> bool:
    return _weight_shards(run) > 1 or (run.expert_gtp_weight_remat_size or 1) > 1


DEFECTS = (
    Defect(
        id="ML-6080",
        effect="Gradients of experts are reduced over the wrong ranks",
        severity=4,
        signs=Sign(
            "megatron.core.extensions.transformer_engine:TELinear.__init__",
            has="gtp",
            lacks="expert_gtp_weight_remat_size != self.config.gtp_weight_remat_size",
        ),
        affects=lambda run: (
            run.num_experts
            and (run.expert_model_parallel_size or 1) == 1
            and expert_tensor_parallel(run) == tensor_parallel(run)
            and _weight_shards(run) != (run.expert_gtp_weight_remat_size or 1)
        ),
        when="--num-experts with --expert-model-parallel-size 1, --expert-tensor-parallel-size as large as "
        "--tensor-model-parallel-size, and --expert-tensor-parallel-num-weight-shards other than "
        "--tensor-parallel-num-weight-shards",
        instead="give both the same number of weight shards",
        state="fixed on main",
        evidence="read",
        seen_by="copies",
        second_reading="the fixing commit; source of 0.19.0",
    ),
    Defect(
        id="ML-6207",
        effect="Neighbouring weights share a buffer, so a layer may compute with the weights of the next one",
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
        instead="leave out --tensor-parallel-num-weight-shards",
        more_links=("NVIDIA/Megatron-LM#6407",),
        state="fixed on main",
        evidence="read",
        second_reading="the fixing commit; source of 0.19.0",
    ),
    Defect(
        id="ML-6388",
        effect="A weight may be prefetched before its data-parallel all-gather has ended",
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
        second_reading="the fixing commit; source of 0.19.0",
    ),
    Defect(
        id="ML-6242",
        effect="MTP heads that share one layer compute with stale weights from the second depth on",
        severity=4,
        signs=Sign(f"{_GTP}:GTPShardedParam", has="prev_w", lacks="_prefetch_available"),
        affects=lambda run: _has_gtp(run) and repeats_a_head(run),
        when=f"{_FLAG}, with --mtp-use-repeated-layer and --mtp-num-layers > 1",
        instead=_INSTEAD,
        state="fixed on main",
        evidence="read",
        second_reading="the fixing commit; source of 0.19.0",
    ),
    Defect(
        id="ML-6565",
        effect="A placeholder, whose memory is not set to zero, is added to the gradients of shared embeddings",
        severity=4,
        signs=Sign(
            f"{_GTP}:GTPShardedParam",
            has="get_dummy_wgrad(list(param.main_grad.shape), param.dtype)",
            lacks="get_dummy_wgrad(list(param.main_grad.shape), param.dtype, zero=True)",
        ),
        affects=lambda run: (
            _weight_shards(run) > 1
            and pipeline_parallel(run) == 1
            and (run.mtp_num_layers or run.untie_embeddings_and_output_weights is False)
        ),
        when=f"{_DENSE}, without pipeline parallelism, with --mtp-num-layers or without "
        "--untie-embeddings-and-output-weights",
        instead="leave out --tensor-parallel-num-weight-shards",
        state="fixed on main",
        evidence="read",
        second_reading="the fixing commit; source of 0.19.0",
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
        affects=lambda run: _weight_shards(run) > 1 and run.bf16 and run.accumulate_allreduce_grads_in_fp32,
        when=f"{_DENSE}, with --bf16 and without --grad-reduce-in-bf16",
        instead="leave out --tensor-parallel-num-weight-shards",
        state="fixed on main",
        evidence="read",
        second_reading="title of the fixing commit; source of 0.19.0; doctor with weight shards",
    ),
    Defect(
        id="ML-6717",
        effect="The loss of an evaluation is that of a part of its samples",
        kind="wrong log",
        severity=2,
        signs=Sign(
            "megatron.training.training:evaluate", has="torch.distributed.all_reduce(val, group=eval_pgc.dp_cp)"
        ),
        affects=lambda run: _weight_shards(run) > 1 and run.eval_iters,
        when=f"{_DENSE}, with --eval-iters",
        state="fixed on main",
        evidence="read",
        second_reading="the fixing commit",
    ),
    Defect(
        id="ML-6740",
        effect="Muon scales the update of a padded weight as if the zeros that pad it were rows of it",
        severity=2,
        signs=Sign(
            "megatron.core.optimizer.emerging_optimizers:TensorParallelMuon", has="gtp_remat", lacks="_strip_pad"
        ),
        affects=lambda run: _has_gtp(run) and "muon" in str(run.optimizer),
        when=f"{_FLAG}, with --optimizer muon",
        only_if="weights are padded, because their rows do not divide evenly",
        instead=_INSTEAD,
        state="fixed on main, but for --muon-tp-mode distributed",
        evidence="read",
        second_reading="the fixing commit",
    ),
    Defect(
        id="ML-6775",
        effect="Which ranks write a shard of a checkpoint is decided in Megatron's global groups, so with groups of "
        "your own shards may be missing",
        kind="lost state",
        severity=2,
        signs=Sign(
            f"{_LAYERS}:ColumnParallelLinear.__init__", has='wrap_module_params_gtp(self, ["weight"], gtp_remat_group)'
        ),
        affects=lambda run: _has_gtp(run) and run.save,
        when=f"{_FLAG}, with --save",
        only_if="the model is built with process groups of its own (pg_collection)",
        state="fixed on main",
        evidence="read",
        second_reading="the fixing commit",
    ),
)
