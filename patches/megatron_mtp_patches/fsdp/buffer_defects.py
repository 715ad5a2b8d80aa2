"""Megatron-FSDP's buffers and pipelines, and PyTorch's FSDP2."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    expert_parallel,
    expert_tensor_parallel,
    layers_of_hybrid,
    sharding_strategy,
    tensor_parallel,
)
from ..defects.declare import Defect, Sign

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_MEGATRON_FSDP = f"{_FSDP}.megatron_fsdp:"
_BUFFERS = f"{_FSDP}.param_and_grad_buffer"
_ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter:"
_LIMIT = f"{_BUFFERS}:GradReducePipeline._enforce_double_buffer_limit"
_SHARDED = "--use-megatron-fsdp with --data-parallel-sharding-strategy optim_grads_params"
_DOUBLE_BUFFER = f"{_SHARDED} and --fsdp-double-buffer"
_NO_DOUBLE_BUFFER = "leave out --fsdp-double-buffer, and --use-nccl-ub, which needs it"


def _has_double_buffer(run: Any) -> bool:
    """True if units have two buffers; with other strategies Megatron's wrapper makes no units."""
    return bool(sharding_strategy(run) == "optim_grads_params" and run.fsdp_double_buffer)


def _recomputes_linear_layers(run: Any) -> bool:
    """True if linear layers, whose weights may be MXFP8, run again in backward; norms, core_attn, moe_act have none."""
    modules = {"mla_up_proj", "mlp", "moe", "shared_experts"}.intersection(run.recompute_modules or ())
    return run.recompute_granularity == "full" or bool(run.recompute_granularity == "selective" and modules)


def _has_gradients_in_type_of_weights(run: Any) -> bool:
    """True if gradients are added up in the type of the weights, which in bf16 is not the default."""
    if run.bf16:
        return bool(run.grad_reduce_in_bf16 or run.grad_reduce_in_fp32 is False)
    return not (run.fp16 and (run.accumulate_allreduce_grads_in_fp32 or run.grad_reduce_in_fp32))


def _has_mamba_layers(run: Any) -> bool:
    """True if a layer is a Mamba layer, or may be: the pattern of a hybrid model is not known."""
    return "M" in layers_of_hybrid(run) or bool(run.is_hybrid_model and not layers_of_hybrid(run))


DEFECTS = (
    Defect(
        id="ML-4054",
        effect="A backward pass may end in an AssertionError, No buffer found for bucket_id, because a third unit asks "
        "for a gradient buffer while two are still being reduced",
        kind="crash",
        severity=3,
        signs=Sign(_LIMIT, has="if len(double_buf_units) > 2:"),
        fixed_by=Sign(f"{_BUFFERS}:", has="p._megatron_fsdp_model.grad_reduce_pipeline"),
        affects=_has_double_buffer,
        when=_DOUBLE_BUFFER,
        only_if="the queue of reductions still holds both",
        instead=_NO_DOUBLE_BUFFER,
        state="fixed in 0.18.0",
        evidence="reported",
        second_reading="buffers, their allocator, wrappers and trainers of 0.16.1 to 0.19.0: what sets the setting and "
        "which strategies have units; the threads of #4054 and #5222; doctor under its flags and with each strategy",
    ),
    Defect(
        id="ML-5222",
        effect="Weight gradients may be wrong, because a unit writes its own into the buffer from which those of its "
        "neighbour are still being reduced",
        severity=3,
        signs=Sign(_LIMIT, has="if len(double_buf_units) > 1:"),
        affects=_has_double_buffer,
        when=_DOUBLE_BUFFER,
        only_if="that reduction has not ended by then",
        instead=_NO_DOUBLE_BUFFER,
        state="fixed in 0.19.0",
        introduced_by=("NVIDIA/Megatron-LM#4054",),
        evidence="reported",
        second_reading="sources of 0.16.1, 0.18.2 and 0.19.0; what sets its setting there; the threads of #4054 and "
        "#5222; which streams wait, and which buffers are freed, with stand-ins on 0.16.1 to main; doctor under its "
        "flags and just outside",
    ),
    Defect(
        id="ML-4054b",
        effect="Weight gradients may be wrong, because a unit writes its own into the buffer from which those of the "
        "unit two before it are still being reduced: only the stream of the reductions waits for them",
        severity=3,
        signs=Sign(_LIMIT, has=("if len(double_buf_units) > 2:", "with torch.cuda.stream(self.rs_stream):")),
        affects=_has_double_buffer,
        when=_DOUBLE_BUFFER,
        only_if="that reduction has not ended by then",
        instead=_NO_DOUBLE_BUFFER,
        introduced_by=("NVIDIA/Megatron-LM#4054",),
        evidence="read",
    ),
    Defect(
        id="ML-4810",
        effect="Training ends in an illegal memory access, because a bucket that fits no double buffer is freed in use",
        kind="crash",
        severity=3,
        signs=Sign(f"{_BUFFERS}:FixedPoolAllocator", has="self.backup_allocator = TemporaryBucketAllocator()"),
        affects=_has_double_buffer,
        when=_DOUBLE_BUFFER,
        only_if="the layers of the model differ in size",
        instead=_NO_DOUBLE_BUFFER,
        state="fixed in 0.19.0",
        evidence="reported",
        second_reading="sources of 0.16.1, 0.18.2 and 0.19.0; what sets its setting there; doctor under its flags "
        "and just outside",
    ),
    Defect(
        id="ML-4990",
        effect="The backward pass of fused experts may read weights that are not gathered, and end in an illegal "
        "memory access",
        kind="crash",
        severity=3,
        signs=Sign(
            _MEGATRON_FSDP,
            has="enable_fine_grained_param_gather_backward_hook",
            lacks="fine_grained_recurse_module_types",
        ),
        affects=lambda run: (
            sharding_strategy(run) == "optim_grads_params"
            and run.num_experts
            and run.moe_grouped_gemm
            and run.use_transformer_engine_op_fuser
            and run.overlap_moe_expert_parallel_comm
        ),
        when=f"{_SHARDED}, --num-experts, --moe-grouped-gemm, --use-transformer-engine-op-fuser and "
        "--overlap-moe-expert-parallel-comm",
        instead="leave out --overlap-moe-expert-parallel-comm or --use-transformer-engine-op-fuser",
        more_links=("NVIDIA/Megatron-LM#5636",),
        state="fixed in 0.19.0",
        evidence="reported",
        second_reading="hooks, wrappers, experts and the schedule of 0.16.1 to 0.19.0, of which 0.18 is the first with "
        "this overlap; the threads of #4990 and #5636; doctor under its flags and just outside",
    ),
    Defect(
        id="ML-3991",
        effect="Recomputation and the backward pass may use MXFP8 weights of the wrong layout",
        severity=3,
        signs=Sign(
            _MEGATRON_FSDP,
            has="enable_fine_grained_param_gather_hook",
            lacks="sub_module._training_state = TrainingState.PRE_BACKWARD",
        ),
        affects=lambda run: (
            sharding_strategy(run) == "optim_grads_params"
            and run.fp8_recipe == "mxfp8"
            and run.fp8_param_gather
            and _recomputes_linear_layers(run)
        ),
        when=f"{_SHARDED}, --fp8-recipe mxfp8, --fp8-param-gather and --recompute-granularity full, or selective with "
        "--recompute-modules mla_up_proj, mlp, moe or shared_experts",
        instead="leave out --fp8-param-gather",
        state="fixed in 0.18.0",
        evidence="reported",
        second_reading="hooks and wrappers of 0.16.1, 0.17.1 and 0.18.2; which modules have weights to recompute; "
        "doctor under its flags and just outside",
    ),
    Defect(
        id="ML-2904",
        effect="Gradients are wrong, because TransformerEngine before 2.10 adds weight gradients to a buffer whose "
        "content it should overwrite",
        severity=4,
        signs=Sign(
            _ADAPTER, has="class FullyShardedDataParallel(_BaseDataParallel):", lacks="is_te_min_version('2.10')"
        ),
        affects=lambda run: (
            sharding_strategy(run) in ("optim_grads", "optim_grads_params")
            and run.gradient_accumulation_fusion
            and () < run.transformer_engine < (2, 10)
            and _has_gradients_in_type_of_weights(run)  # else the output layer's backward pass ends in an error
        ),
        when="--use-megatron-fsdp with --data-parallel-sharding-strategy optim_grads or optim_grads_params, without "
        "--no-gradient-accumulation-fusion, with TransformerEngine before 2.10 and gradients in the type of the weights"
        ": --bf16 with --grad-reduce-in-bf16, --fp16 without --accumulate-allreduce-grads-in-fp32, or fp32",
        instead="add --no-gradient-accumulation-fusion",
        state="fixed in 0.17.0, which refuses such a TransformerEngine",
        evidence="reported",
        second_reading="wrappers, buffers and linear layers of 0.16.1 and 0.17.1; the threads of #2904 and #3822; "
        "cases of its predicate",
    ),
    Defect(
        id="ML-3191",
        effect="Megatron-FSDP guesses from the classes and names of layers which weights are split over "
        "tensor-parallel ranks, so checkpoints and the logged norm of parameters may be wrong for layers that it does "
        "not know",
        severity=2,
        signs=Sign(f"{_ADAPTER}FullyShardedDataParallel.__init__", has="self._fix_tensor_parallel_attributes(module)"),
        affects=lambda run: run.use_megatron_fsdp and tensor_parallel(run) > 1,
        when="--use-megatron-fsdp with --tensor-model-parallel-size > 1",
        only_if="the model has layers other than those of a plain GPT",
        state="fixed in 0.18.0",
        evidence="reported",
        second_reading="wrappers, DTensors and norms of 0.16.1, 0.17.1 and 0.18.2; the threads of #3191 and #4664",
    ),
    Defect(
        id="ML-4717",
        effect=(
            "Training ends in an error, because a Mamba layer reads the weight of its convolution after it was freed"
        ),
        kind="crash",
        severity=3,
        signs=Sign(f"{_BUFFERS}:AllGatherPipeline.reset", lacks="preserve_non_fsdp_units"),
        affects=lambda run: sharding_strategy(run) == "optim_grads_params" and _has_mamba_layers(run),
        when=f"{_SHARDED} and Mamba layers, M in --hybrid-override-pattern or --hybrid-layer-pattern",
        only_if="Mamba layers are not FSDP units, as in Megatron's own wrapper",
        state="fixed in 0.18.0",
        evidence="reported",
        second_reading="the gathering pipeline and wrappers of 0.16.1, 0.17.1 and 0.18.2; doctor with Mamba layers and "
        "in a GPT",
    ),
    Defect(
        id="ML-2840",
        effect="Different experts are sharded and reduced as one, because Megatron-FSDP takes the groups of ranks of "
        "dense layers for theirs (with --outer-dp-sharding-strategy optim it cannot, and does not start)",
        severity=5,
        signs=Sign(f"{_ADAPTER}_get_hsdp_tp_mesh", lacks="ep_size"),
        affects=lambda run: (
            run.use_megatron_fsdp
            and (run.num_distributed_optimizer_instances or 1) > 1
            and expert_parallel(run) > 1
            and tensor_parallel(run) % (expert_parallel(run) * expert_tensor_parallel(run))
        ),
        when="--use-megatron-fsdp with --num-distributed-optimizer-instances > 1 and --expert-model-parallel-size > 1, "
        "where --expert-model-parallel-size times --expert-tensor-parallel-size does not divide "
        "--tensor-model-parallel-size",
        instead="--num-distributed-optimizer-instances 1",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="the source of 0.16.1; four ranks with two instances and EP 2, by both outer strategies; eight "
        "ranks with TP 2, EP 2 and ETP 1, which are right",
    ),
    Defect(
        id="ML-4953",
        effect="The first step of PyTorch's FSDP2 ends in a TypeError about force_all_reduce",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
            has="model_chunk.finish_grad_sync(force_all_reduce=force_all_reduce)",
        ),
        fixed_by=Sign(
            "megatron.core.distributed.torch_fully_sharded_data_parallel:",
            has="def finish_grad_sync(self, force_all_reduce=False):",
        ),
        affects=lambda run: run.use_torch_fsdp2,
        when="--use-torch-fsdp2",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="the end of backward, the base of wrappers and FSDP2's wrapper of 0.16.1 to 0.19.0; doctor "
        "under its flags",
    ),
)
