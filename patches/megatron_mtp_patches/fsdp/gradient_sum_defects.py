"""Megatron-FSDP: how the gradients of all microbatches of a step are added up, and in which dtype."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    FUSES_UNDER_MEGATRON_FSDP,
    RECOMPUTES_DEPTHS,
    context_parallel,
    data_parallel,
    expert_data_parallel,
    fuses_weight_gradients,
    microbatches,
    recomputes_heads,
    repeats_a_head,
    sharding_strategy,
    type_name,
)
from ..defects.declare import Defect, Sign

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_BUFFERS = f"{_FSDP}.param_and_grad_buffer"
_ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel"
_REDUCE = f"{_BUFFERS}:GradReducePipeline._bucket_group_gradient_reduce"

_REPEATS_A_HEAD = Sign(
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock._build_layers",
    has="self.mtp_use_repeated_layer",
)


def _shards_gradients(run: Any) -> bool:
    return sharding_strategy(run) in ("optim_grads", "optim_grads_params")


def _has_single_replica(run: Any) -> bool:
    """True if the dense layers or the experts have one replica."""
    if not (run.data_parallel_size or run.world_size):
        return False
    return data_parallel(run) * context_parallel(run) == 1 or bool(run.num_experts and expert_data_parallel(run) == 1)


def _reduces_in_another_type(run: Any) -> bool:
    """True if gradients are reduced in another type than that in which they are kept."""
    kept, sent = (type_name(run.megatron_fsdp_main_grads_dtype), type_name(run.megatron_fsdp_grad_comm_dtype))
    kept = kept or ("bfloat16" if run.bf16 else "float16" if run.fp16 else "float32")
    return bool(sent) and sent != kept


def _runs_experts_alone(run: Any) -> bool:
    """True if experts run forward outside of the forward pass of their layer, after which Megatron-FSDP's hook runs."""
    is_recomputed = run.recompute_granularity == "selective" and "moe" in (run.recompute_modules or ())
    return bool(is_recomputed or run.overlap_moe_expert_parallel_comm)


def _loses_microbatches(run: Any) -> bool:
    """True if a microbatch overwrites the gradients of those before, or their sum is scaled with each."""
    is_overwritten = fuses_weight_gradients(run) and run.transformer_engine >= (2, 10)
    is_scaled = not (run.calculate_per_token_loss or run.ddp_average_in_collective or run.average_in_collective)
    is_scaled = is_scaled and data_parallel(run) * context_parallel(run) > 1
    return microbatches(run) > 1 and bool(is_overwritten or is_scaled)


DEFECTS = (
    Defect(
        id="ML-5462",
        effect="Gradients are added up and reduced in the half precision of the weights, although the log or a flag "
        "says fp32, so small gradients vanish next to the sum of many microbatches",
        severity=4,
        signs=tuple(
            Sign(
                f"{_ADAPTER}{version}.__init__",
                has="main_grads_dtype=ddp_config.megatron_fsdp_main_grads_dtype",
                lacks="ddp_config.grad_reduce_in_fp32",
            )
            for version in ("", "V1")
        ),
        affects=lambda run: (
            run.use_megatron_fsdp  # in either version of main
            and (run.bf16 or run.fp16)
            and (run.accumulate_allreduce_grads_in_fp32 or run.grad_reduce_in_fp32)
            and not type_name(run.megatron_fsdp_main_grads_dtype)
        ),
        when="--use-megatron-fsdp with --bf16 and gradients in fp32, as by default (not with --grad-reduce-in-bf16), "
        "or with --fp16 and --accumulate-allreduce-grads-in-fp32, and no --megatron-fsdp-main-grads-dtype",
        instead="add --megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype fp32",
        introduced_by=("NVIDIA/Megatron-LM#5462",),
        evidence="reproduced",
        patch="sum-fsdp-gradients-in-fp32",
        second_reading="the wrappers of models of 0.17.1 to main, both versions of main's; what validate_args makes of "
        "the dtypes of gradients in 0.18.2 to main; its program on 0.19.2; doctor in bf16 and fp16, with and without "
        "--grad-reduce-in-bf16; the wrapper of its patch",
    ),
    Defect(
        id="ML-6660",
        effect="The gradients of layers with one replica, as experts have where expert parallelism is as large as data "
        "parallelism, are added to themselves with each microbatch, so they are too large",
        severity=5,
        signs=Sign(
            _REDUCE, has=("local_grad += reduced_grad", "grad_buffer.append(gbuf.get_shard_from_local_buffer())")
        ),
        affects=lambda run: _shards_gradients(run) and _has_single_replica(run),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim_grads or optim_grads_params, and one "
        "replica of experts (EP x ETP = DP x CP x TP) or of the model (context-parallel ranks count, too)",
        state="fixed in 0.17.0",
        evidence="reproduced",
        patch="add-fsdp-gradients-of-single-replicas",
        second_reading="sources of 0.16.1 and 0.18.2; its program on 0.16.1; the thread of #6660; the wrapper of "
        "its patch",
    ),
    Defect(
        id="ML-6660b",
        effect="The gradients of layers with one replica, as experts have where expert parallelism is as large as data "
        "parallelism, are added to themselves with each microbatch, so they are too large",
        severity=5,
        signs=Sign(_REDUCE, has="if gbuf.is_data_distributed or custom_grad_comm_dtype:"),
        affects=lambda run: _shards_gradients(run) and _has_single_replica(run) and _reduces_in_another_type(run),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim_grads or optim_grads_params, "
        "--megatron-fsdp-grad-comm-dtype other than --megatron-fsdp-main-grads-dtype, and one replica of experts (EP x "
        "ETP = DP x CP x TP) or of the model (context-parallel ranks count, too)",
        only_if="Megatron is 0.19 or newer, the run is in fp32 or fp16, or --grad-reduce-in-bf16 is given, which "
        "before 0.19 is --megatron-fsdp-grad-comm-dtype bf16 as well",
        instead="set --megatron-fsdp-grad-comm-dtype and --megatron-fsdp-main-grads-dtype to the same type",
        more_links=("NVIDIA/Megatron-LM#6773",),
        state="fixed after main of 2026-08-22",
        evidence="reproduced",
        patch="add-fsdp-gradients-of-single-replicas",
        unless=RECOMPUTES_DEPTHS,
        second_reading="sources of 0.18.2 and main; the types that trainers of 0.17.1 to 0.19.0 set; its program on "
        "0.19.2; doctor under its flags and just outside; the threads of #6660, which is closed, and of "
        "#6773, which is merged",
    ),
    Defect(
        id="fsdp-gradients-of-single-replicas",
        effect="Of the gradients of layers with one replica, as experts have where expert parallelism is as large as "
        "data parallelism, only those of the last microbatch count, or those of earlier ones are scaled with each",
        severity=5,
        signs=Sign(
            f"{_BUFFERS}:ParamAndGradBuffer._init_each_parameter_group_buffers",
            has="is_data_distributed=is_grad_buffer_distributed and main_buf_dp_group.size() > 1",
        ),
        affects=lambda run: _shards_gradients(run) and _has_single_replica(run) and _loses_microbatches(run),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim_grads or optim_grads_params, several "
        "microbatches, and one replica of experts (EP x ETP = DP x CP x TP) or of the model (context-parallel ranks "
        "count, too); without --no-gradient-accumulation-fusion, with TransformerEngine 2.10 or newer, or on several "
        "ranks without --calculate-per-token-loss and --ddp-average-in-collective",
        only_if=f"weight gradients are not fused, or {FUSES_UNDER_MEGATRON_FSDP}",
        instead="on one rank, with --calculate-per-token-loss or with --ddp-average-in-collective, add "
        "--no-gradient-accumulation-fusion",
        more_links=("NVIDIA/Megatron-LM#6773",),
        state="fixed after main of 2026-08-22",
        evidence="reproduced",
        patch="add-fsdp-gradients-of-single-replicas",
        unless=RECOMPUTES_DEPTHS,
        second_reading="sources of 0.16.1, 0.18.2 and main; the thread and the branch of #6773; its program on 0.19.2; "
        "doctor under its flags and just outside; the wrapper of its patch",
    ),
    Defect(
        id="ML-6357a",
        effect="In layers of TransformerEngine each microbatch overwrites the weight gradients of the one before, so "
        "only the last one counts",
        severity=4,
        signs=Sign(f"{_FSDP}.megatron_fsdp:", has="param.overwrite_main_grad = True"),
        affects=lambda run: (
            sharding_strategy(run) == "optim"
            and fuses_weight_gradients(run)
            and microbatches(run) > 1
            and run.transformer_impl != "local"
            and run.transformer_engine >= (2, 10)
        ),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim and several microbatches, with "
        "TransformerEngine 2.10 or newer, without --no-gradient-accumulation-fusion and --transformer-impl local",
        only_if=FUSES_UNDER_MEGATRON_FSDP,
        instead="add --no-gradient-accumulation-fusion",
        state="fixed on main",
        evidence="reproduced",
        patch="add-fsdp-gradients-of-all-microbatches",
        after="ML-3067",  # 0.16.1 adds what it should replace
        second_reading="sources of 0.16.1, 0.18.2 and main; linear layers of 0.16.1 to 0.18.2 and the thread of #3822; "
        "its program on 0.19.2; doctor under its flags and just outside; the wrappers of its patch",
    ),
    Defect(
        id="fsdp-own-layers-keep-last-microbatch",
        effect="The output layer, and other linear layers of Megatron's own, keep the weight gradient of the last "
        "microbatch only",
        severity=4,
        signs=Sign(
            "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.backward",
            has="weight.main_grad = weight.get_main_grad()",
        ),
        affects=lambda run: (
            sharding_strategy(run) in ("no_shard", "optim") and fuses_weight_gradients(run) and microbatches(run) > 1
        ),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy no_shard or optim and several microbatches, "
        "without --no-gradient-accumulation-fusion",
        only_if=FUSES_UNDER_MEGATRON_FSDP,
        instead="add --no-gradient-accumulation-fusion",
        evidence="reproduced",
        patch="add-fsdp-gradients-of-all-microbatches",
        second_reading="linear layers of 0.16.1, 0.17.1, 0.18.2, 0.19.0 and main; the thread of #3822; its program on "
        "0.18.2; doctor with each strategy; the wrapper of its patch",
    ),
    Defect(
        id="fsdp-fused-experts-keep-last-microbatch",
        effect="Grouped experts under the operation fuser keep the weight gradient of the last microbatch only",
        severity=4,
        signs=Sign(
            "megatron.core.transformer.moe.experts:TEGroupedMLP._ensure_main_grad",
            has="param.overwrite_main_grad = True",
        ),
        # There all layers of TransformerEngine keep the last one: ML-6357a.
        fixed_by=Sign(f"{_FSDP}.megatron_fsdp:", has="param.overwrite_main_grad = True"),
        affects=lambda run: (
            sharding_strategy(run) == "optim"
            and fuses_weight_gradients(run)
            and microbatches(run) > 1
            and run.num_experts
            and run.moe_grouped_gemm
            and run.use_transformer_engine_op_fuser
            and _runs_experts_alone(run)
        ),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim, several microbatches, --num-experts, "
        "--moe-grouped-gemm, --use-transformer-engine-op-fuser and --overlap-moe-expert-parallel-comm or "
        "--recompute-granularity selective with --recompute-modules moe, without --no-gradient-accumulation-fusion",
        instead="add --no-gradient-accumulation-fusion",
        evidence="read",
        patch="add-fsdp-gradients-of-all-microbatches",
        second_reading="experts, hooks and buffers of 0.18.2, 0.19.0 and main; the attribute in forward and backward "
        "passes of main, with and without recomputation; doctor under its flags and just outside; the wrapper of its "
        "patch",
    ),
    Defect(
        id="fsdp-repeated-head",
        effect="Under Megatron-FSDP a repeated MTP head keeps the gradient of only one of its depths",
        severity=4,
        signs=_REPEATS_A_HEAD,
        affects=lambda run: (
            repeats_a_head(run)
            and sharding_strategy(run) in ("optim", "optim_grads", "optim_grads_params")
            and fuses_weight_gradients(run)
        ),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim, optim_grads or optim_grads_params, "
        "--mtp-use-repeated-layer and --mtp-num-layers > 1, without --no-gradient-accumulation-fusion",
        only_if=f"{FUSES_UNDER_MEGATRON_FSDP}; on main optim adds up",
        unless=RECOMPUTES_DEPTHS,
        evidence="reproduced",
        instead="--no-gradient-accumulation-fusion",
        patch="sum-gradients-of-repeated-weights",
        second_reading="sources of 0.17.1 to main, and which strategies overwrite there; the thread of #3822; its "
        "program; predicate just outside",
    ),
    Defect(
        id="fsdp-recomputed-repeated-head",
        effect="The gradients of a repeated MTP layer that is recomputed are wrong, in its program by a third, because "
        "each depth has a backward pass of its own, whose gradients Megatron-FSDP takes for those of all depths",
        severity=4,
        signs=_REPEATS_A_HEAD,
        affects=lambda run: (
            _shards_gradients(run)
            and repeats_a_head(run)
            and recomputes_heads(run)
            and data_parallel(run) * context_parallel(run) > 1
        ),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim_grads or optim_grads_params, "
        "--mtp-use-repeated-layer and --mtp-num-layers > 1, and --recompute-granularity full with --recompute-method "
        "uniform, on several data- or context-parallel ranks",
        only_if="Megatron is not 0.18, whose recomputation of MTP layers ends in an error (ML-3457) unless a patch or "
        "a framework repairs it",
        instead="leave out --recompute-granularity full",
        evidence="reproduced",
        second_reading="recomputation of MTP layers, hooks and buffers of 0.17.1, 0.18.2 and main; its program; "
        "predicate just outside",
    ),
)
