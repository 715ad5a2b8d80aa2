"""Megatron-FSDP: the reduction of gradients over ranks, and their norms."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    context_parallel,
    data_parallel,
    expert_parallel,
    expert_tensor_parallel,
    has_megatron_fsdp,
    sharding_strategy,
    tensor_parallel,
)
from ..defects.declare import Defect, Diff, Sign

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_BUFFERS = f"{_FSDP}.param_and_grad_buffer"
_REDUCE = f"{_BUFFERS}:GradReducePipeline._bucket_group_gradient_reduce"
_SETUP = "megatron.core.optimizer:get_megatron_optimizer"
_OTHER_STRATEGY = "choose another --data-parallel-sharding-strategy"


def _expert_ranks(run: Any) -> int:
    """Over how many ranks the experts of a layer lie."""
    return expert_parallel(run) * expert_tensor_parallel(run)


def _has_several_replicas(run: Any) -> bool:
    """True if several ranks have the same dense layers, or if the number of ranks is not known."""
    is_known = run.data_parallel_size or run.world_size
    return not is_known or data_parallel(run) * context_parallel(run) > 1


def _clips_replicas(run: Any) -> bool:
    """True if gradients that all data-parallel ranks have are clipped by their norm, which else is not computed."""
    return sharding_strategy(run) == "no_shard" and run.clip_grad != 0


DEFECTS = (
    Defect(
        id="ML-3067",
        effect="Each data-parallel rank adds its own gradient to what all have reduced, so gradients are too large",
        severity=4,
        signs=Sign(
            _REDUCE, has=("local_grad += reduced_grad", "grad_buffer.append(gbuf.get_shard_from_local_buffer())")
        ),
        affects=lambda run: sharding_strategy(run) == "optim" and run.overlap_grad_reduce,
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim and --overlap-grad-reduce",
        instead=f"{_OTHER_STRATEGY}, or leave out --overlap-grad-reduce and --overlap-param-gather, which needs it",
        state="fixed in 0.17.0",
        evidence="reproduced",
        patch="replace-fsdp-gradients-by-their-mean",
        diff=Diff(
            _REDUCE,
            """
            if ddp_config.data_parallel_sharding_strategy == "optim":  # the shard has what this rank has added up
                local_grad.copy_(reduced_grad)
                continue
            """,
            "inside",
            "zip(grad_buffer, reduced_grad)",
        ),
        second_reading="sources of 0.16.1 and 0.18.2; what validate_args of 0.16.1 refuses; its program on 0.16.1; "
        "cases of doctor on 0.17.1; the wrapper of its patch",
    ),
    Defect(
        id="ML-6357b",
        effect="Gradients are reduced twice: all of them, or those of experts, are too small, and too large with "
        "--calculate-per-token-loss",
        severity=3,
        signs=Sign(
            f"{_FSDP}.megatron_fsdp:", has="if grad_reduce_every_bprop or is_last_microbatch or self.model_auto_sync:"
        ),
        affects=lambda run: False,
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim, or no_shard and expert parallelism, "
        "without --overlap-grad-reduce",
        only_if="another trainer than Megatron's calls no_sync() or sync()",
        instead="add --overlap-grad-reduce",
        state="fixed on main",
        evidence="reproduced",
        second_reading="hooks and the reduction of 0.16.1, 0.18.2, 0.19.0 and main; what Megatron's schedules call",
    ),
    Defect(
        id="ML-3754a",
        effect="The gradient norm counts each data-parallel rank once, though all have the same gradients, so it is "
        "too large, without experts by the square root of their number, and gradients are clipped too much",
        severity=4,
        signs=Sign(_SETUP, has="use_megatron_fsdp", lacks="effective_intra_dist_opt_group"),
        affects=lambda run: (
            _clips_replicas(run)
            and _has_several_replicas(run)
            and run.overlap_grad_reduce
            and run.overlap_param_gather
            and run.use_distributed_optimizer is not False  # other optimizers' norm is a sum over TP and PP
        ),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy no_shard, which is the default of 0.16 and "
        "0.17, --use-distributed-optimizer, --overlap-grad-reduce and --overlap-param-gather, and --clip-grad above 0, "
        "as by default, on several data- or context-parallel ranks",
        instead=_OTHER_STRATEGY,
        state="fixed in 0.18.0",
        evidence="reproduced",
        patch="count-fsdp-replicas-once",
        seen_by="norm",
        second_reading="the optimizers' setup and steps of 0.16.1 to 0.18.2; its program on 0.17.1; doctor under its "
        "flags and just outside",
    ),
    Defect(
        id="ML-3754b",
        effect="Gradients are never reduced, so each data-parallel rank trains a different model",
        severity=5,
        signs=Sign(f"{_BUFFERS}:ParamAndGradBuffer.all_reduce_gradients", has="if gbuf is not None:\n    continue"),
        affects=lambda run: (
            sharding_strategy(run) == "no_shard"
            and _has_several_replicas(run)
            and run.overlap_param_gather
            and not run.overlap_grad_reduce
        ),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy no_shard, which is the default of 0.16 and "
        "0.17, and --overlap-param-gather without --overlap-grad-reduce, on several data- or context-parallel ranks",
        only_if="another trainer runs than Megatron's, which refuses these flags",
        instead=_OTHER_STRATEGY,
        state="fixed in 0.18.0",
        evidence="reproduced",
        patch="reduce-fsdp-gradients-of-replicas",
        diff=Diff(
            f"{_BUFFERS}:ParamAndGradBuffer.all_reduce_gradients", "gbuf is None", "instead of", "gbuf is not None"
        ),
        seen_by="copies",
        second_reading="sources of 0.17.1; the flags, which validate_args of 0.16.1 to 0.19.0 refuses; its patch",
    ),
    Defect(
        id="ML-3754c",
        effect="The first step ends in an AttributeError about fetch_bucket",
        kind="crash",
        severity=3,
        signs=Sign(_SETUP, has="use_megatron_fsdp", lacks="effective_intra_dist_opt_group"),
        affects=lambda run: (
            sharding_strategy(run) == "no_shard"
            and not run.overlap_param_gather
            and run.use_distributed_optimizer is not False
        ),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy no_shard, which is the default of 0.16 and "
        "0.17, and --use-distributed-optimizer, without --overlap-param-gather",
        instead=_OTHER_STRATEGY,
        state="fixed in 0.18.0",
        evidence="reproduced",
        patch="reduce-fsdp-gradients-of-replicas",
        second_reading="sources of 0.17.1 and 0.18.2; doctor under its flags and just outside on 0.17.1; its patch",
    ),
    Defect(
        id="fsdp-counts-experts-twice",
        effect="The gradient norm counts the squares of experts' gradients TP / (EP x ETP) times, so gradients are "
        "clipped too much",
        severity=3,
        signs=Sign(_SETUP, has="effective_intra_dist_opt_group"),
        affects=lambda run: _clips_replicas(run) and run.num_experts and _expert_ranks(run) < tensor_parallel(run),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy no_shard, --clip-grad above 0, as by default, "
        "--num-experts and EP x ETP less than --tensor-model-parallel-size",
        only_if="Megatron is newer than 0.18, or experts are not grouped (--moe-grouped-gemm)",
        instead=_OTHER_STRATEGY,
        evidence="reproduced",
        patch="count-fsdp-replicas-once",
        after="ML-5916c",  # which reduces these experts as if they were dense
        seen_by="norm",
        second_reading="the optimizer's setup of 0.18.2 and main; its program on 0.18.2; doctor under its flags and "
        "just outside",
    ),
    Defect(
        id="fsdp-norm-without-other-experts",
        effect="The gradient norm of each rank counts its own experts only, so ranks clip by different norms and their "
        "copies of all other weights drift apart",
        severity=5,
        signs=Sign(_SETUP, has="effective_intra_dist_opt_group"),
        affects=lambda run: _clips_replicas(run) and run.num_experts and _expert_ranks(run) > tensor_parallel(run),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy no_shard, --clip-grad above 0, as by default, "
        "--num-experts and EP x ETP greater than --tensor-model-parallel-size",
        instead=_OTHER_STRATEGY,
        evidence="reproduced",
        patch="count-fsdp-replicas-once",
        seen_by="norm",
        second_reading="the optimizer's setup of 0.18.2 and main; its program on 0.18.2; doctor under its flags and "
        "just outside",
    ),
    Defect(
        id="fsdp-weight-norm-without-other-experts",
        effect="The logged norm of the parameters counts the experts of one expert-parallel rank only",
        kind="wrong log",
        severity=1,
        signs=tuple(
            Sign(
                f"megatron.training.{module}:calc_dtensor_params_l2_norm",
                has=(
                    "zip(dtensor_spec.device_mesh.get_all_groups(), dtensor_spec.placements",
                    "total_norm_2 += norm_2",
                ),
                lacks="expert",
            )
            for module in ("utils", "utils.common_utils")
        ),
        affects=lambda run: (
            has_megatron_fsdp(run) and run.log_params_norm and run.num_experts and expert_parallel(run) > 1
        ),
        when="--use-megatron-fsdp with --log-params-norm, --num-experts and --expert-model-parallel-size > 1",
        evidence="reproduced",
        second_reading="the norm of 0.16.1 to main, and which parameters it gets; its program on 0.18.2; doctor under "
        "its flags and just outside",
    ),
    Defect(
        id="ML-5879",
        effect="The logged number of zeros counts gradients of weights that all tensor-parallel ranks have a copy of, "
        "as those of norms, once for each copy",
        kind="wrong log",
        severity=1,
        signs=Sign(
            "megatron.core.optimizer.clip_grads:count_zeros_fp32",
            has=("._local_tensor", "total_num_zeros += num_zeros"),
            lacks="if is_not_shared and is_not_tp_duplicate: grad = getattr(param, grad_attr)._local_tensor",
        ),
        affects=lambda run: has_megatron_fsdp(run) and run.log_num_zeros_in_grad and tensor_parallel(run) > 1,
        when="--use-megatron-fsdp with --log-num-zeros-in-grad and --tensor-model-parallel-size > 1",
        only_if="Megatron is not 0.18, or --use-precision-aware-optimizer is not given, with which its first step ends "
        "in an error",
        state="open",
        evidence="reproduced",
        patch="count-fsdp-replicas-once",
        second_reading="the count of 0.16.1 to main; its program on 0.18.2; doctor under its flags and just outside",
    ),
)
