"""Megatron-FSDP over several instances of the optimizer, and over several pipeline stages."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import has_megatron_fsdp, pipeline_parallel, sharding_strategy
from ..defects.declare import Defect, Sign

_ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_OPTIMIZER = "megatron.core.optimizer.optimizer:MegatronOptimizer"
_INSTANCES = "--use-megatron-fsdp with --num-distributed-optimizer-instances > 1"
_SHARDED_OVER_INSTANCES = (
    f"{_INSTANCES}, --data-parallel-sharding-strategy optim_grads_params and --outer-dp-sharding-strategy optim"
)
_REPORT = "NVIDIA/Megatron-LM#4891"


def _has_instances(run: Any) -> bool:
    return bool(has_megatron_fsdp(run) and (run.num_distributed_optimizer_instances or 1) > 1)


def _sums_over_instances(run: Any) -> bool:
    """True if the trainer tells Megatron-FSDP which microbatch is the last one, after which it sums."""
    sets_overlap = run.is_of_megatron_bridge and sharding_strategy(run) in ("optim_grads", "optim_grads_params")
    return bool(run.overlap_grad_reduce or sets_overlap)


def _is_sharded_over_instances(run: Any) -> bool:
    is_sharded = sharding_strategy(run) == "optim_grads_params"  # with another one the model is not built
    return bool(_has_instances(run) and is_sharded and run.outer_dp_sharding_strategy == "optim")


DEFECTS = (
    Defect(
        id="ML-4891",
        effect="The gradient norm of each optimizer instance counts its own gradients only, so instances clip parts of "
        "the model by different norms",
        severity=3,
        signs=tuple(
            Sign(f"{_OPTIMIZER}.{name}", has="._local_tensor")
            for name in ("get_main_grads_for_grad_norm", "_filter_grads_for_norm")
        ),
        affects=lambda run: _is_sharded_over_instances(run) and run.clip_grad != 0,
        when=f"{_SHARDED_OVER_INSTANCES}, and --clip-grad above 0, as by default",
        instead="--outer-dp-sharding-strategy no_shard",
        state="open",
        evidence="reproduced",
        seen_by="norm",
        second_reading="the optimizer of 0.16.1 to main; its program on 0.18.2; doctor under its flags and just "
        "outside; the thread of #4891",
    ),
    Defect(
        id="ML-4891b",
        effect="Gradients are never summed over the optimizer instances, so each trains its model, or its part of one, "
        "on its own data only",
        severity=5,
        signs=Sign(
            f"{_FSDP}.megatron_fsdp:MegatronFSDP.finish_grad_sync",
            has="self.synchronize_gradient_reduce() self.attach_grad_to_optimizer_state()",
        ),
        affects=lambda run: _has_instances(run) and not _sums_over_instances(run),
        when=f"{_INSTANCES}, without --overlap-grad-reduce, which optim_grads and optim_grads_params set in "
        "Megatron-Bridge",
        instead="--overlap-grad-reduce",
        state="open",
        evidence="reproduced",
        seen_by="copies",
        second_reading="Megatron-FSDP's hooks of 0.16.1 to main; who calls no_sync in Megatron's trainer and in "
        "Megatron-Bridge; its program on 0.18.2; doctor under its flags and just outside; the thread of #4891",
    ),
    Defect(
        id="fsdp-instances-sum-gradients",
        effect="Gradients are summed over data-parallel ranks and not averaged, so they are as many times too large as "
        "there are such ranks (in an instance, with --ddp-average-in-collective or without --overlap-grad-reduce)",
        severity=3,
        signs=Sign(f"{_FSDP}.param_and_grad_buffer:_create_hfsdp_helper_buffer", lacks="gradient_scaling_factor"),
        affects=lambda run: _is_sharded_over_instances(run) and not run.calculate_per_token_loss,
        when=f"{_SHARDED_OVER_INSTANCES}, without --calculate-per-token-loss",
        instead="--outer-dp-sharding-strategy no_shard",
        evidence="reproduced",
        second_reading="buffers and the scaling of gradients of 0.16.1, 0.17.1 and main; its program on 0.18.2; doctor "
        "under its flags and just outside",
    ),
    # NVIDIA/Megatron-LM#7452, item 12, cannot be met before this is fixed: checkpoints number the layers of each stage
    # from 0, so layers of several stages would have the same names.
    Defect(
        id="fsdp-pipeline-stages",
        effect="Building the model ends in an EinopsError about dp_cp or fsdp, because Megatron-FSDP lays out the "
        "ranks as if there were one pipeline stage",
        kind="crash",
        severity=3,
        signs=Sign(
            f"{_ADAPTER}:_get_dp_tp_mesh", has=("world_size = dist.get_world_size()", "'(dp_cp ep tp) -> ep dp_cp tp'")
        ),
        affects=lambda run: has_megatron_fsdp(run) and pipeline_parallel(run) > 1,
        when="--use-megatron-fsdp with --pipeline-model-parallel-size > 1",
        instead="--pipeline-model-parallel-size 1",
        evidence="reproduced",
        second_reading="the wrapper, and what trainers refuse, of 0.16.1 to main; its program on 0.18.2; doctor with "
        "one and with several stages",
    ),
)
