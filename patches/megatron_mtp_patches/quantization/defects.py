"""Training in FP8, MXFP8 and FP4."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    WITHOUT_OVERLAP_OF_EXPERTS,
    expert_parallel,
    has_graph_scope,
    is_hybrid,
    loads_optimizer,
    shares_gradient_buffer,
)
from ..defects.declare import Defect, Diff, Gap, Sign

_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_START_SYNC = f"{_BUFFER}:_ParamAndGradBucketGroup.start_param_sync"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_SHARED = (
    "--fp8-recipe mxfp8 with --fp8-param-gather and --reuse-grad-buf-for-mxfp8-param-ag (with --optimizer adam "
    "and without --use-megatron-fsdp)"
)
# Each needs the other: without the second TransformerEngine cannot place MXFP8 parameters in a buffer.
_NOT_SHARED = "leave out --fp8-param-gather and --reuse-grad-buf-for-mxfp8-param-ag"
_SAVES_OR_EVALUATES = "--save and --save-interval, or --eval-interval and --eval-iters > 0"


def _gathers_late(run: Any) -> bool:
    """True if MXFP8 parameters are gathered in the next forward pass, through the buffer of the gradients."""
    return shares_gradient_buffer(run) and bool(run.overlap_param_gather)


def _saves(run: Any) -> bool:
    return bool(run.save and run.save_interval)


def _evaluates(run: Any) -> bool:
    return bool(run.eval_interval and run.eval_iters)


DEFECTS = (
    Defect(
        id="ML-5236",
        effect="Each save overwrites all MXFP8 weights with gradients: the checkpoint has these, and so has the next "
        "step's forward pass",
        severity=5,
        signs=Sign(_START_SYNC, has="self._post_param_sync()"),
        fixed_by=Sign(f"{_DDP}.reset_param_sync_dispatch_state"),
        affects=lambda run: _gathers_late(run) and _saves(run),
        when=f"{_SHARED}, --overlap-param-gather, --save and --save-interval",
        instead=_NOT_SHARED,
        more_links=("NVIDIA/Megatron-LM#5487",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1 and 0.18.2, and of the trainer's saves and evaluations there; its program",
    ),
    Defect(
        id="ML-5487a",
        effect="After each save and each evaluation the next step's gradients contain the weights, which the gradient "
        "norm shows as a spike; in 0.16 and 0.17 its forward pass also uses old weights",
        severity=4,
        signs=Sign(_DDP, has="def start_param_sync(", lacks="def reset_param_sync_dispatch_state("),
        affects=lambda run: _gathers_late(run) and (_saves(run) or _evaluates(run)),
        when=f"{_SHARED}, --overlap-param-gather, and {_SAVES_OR_EVALUATES}",
        instead=_NOT_SHARED,
        more_links=("NVIDIA/Megatron-LM#5236",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1 and 0.18.2, and of the trainer's saves and evaluations there; its program",
    ),
    Defect(
        id="ML-5642",
        effect="Layers that only --te-precision-config-file quantizes keep the quantized weights of the first "
        "microbatch of the run, so they do not learn",
        severity=5,
        signs=Sign(
            "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch",
            has="self.config.fp8 is not None",
            lacks="quant_recipe",
        ),
        affects=lambda run: (
            run.te_precision_config_file and not (run.fp8 or run.fp4 or run.disable_parameter_transpose_cache)
        ),
        when="--te-precision-config-file without --fp8-format, --fp4-format and disable_parameter_transpose_cache",
        only_if="the file quantizes a layer",
        instead="set disable_parameter_transpose_cache in TransformerConfig, which has no flag: layers then "
        "quantize their weights in each microbatch",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="quantize-weights-of-each-step",
        diff=Diff(
            "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch",
            """
            if getattr(self.config, "quant_recipe", None) is not None:
                for module in self.modules():
                    if hasattr(module, "is_first_microbatch"):
                        module.is_first_microbatch = True
            """,
        ),
        unless=Gap(
            lambda run: (
                run.cuda_graph_impl in ("local", "transformer_engine") and not has_graph_scope(run, "full_iteration")
            ),
            when="--cuda-graph-impl local or transformer_engine, without --cuda-graph-scope full_iteration",
            because="a captured layer does not read again whether a step begins",
        ),
        second_reading="sources of 0.16.1, 0.18.2 and 0.19.0, and TransformerEngine's linear layer; its program; "
        "its way out, and what CUDA graphs make of the patch, in the sources alone",
    ),
    Defect(
        id="ML-4800",
        effect="Each step sets the weights of dense layers to zero, because the step of the experts gathers them again "
        "from a buffer that is empty by then",
        severity=5,
        signs=Sign(
            f"{_DISTRIBUTED}.step_with_ready_grads", has="model_chunk.start_param_sync()", lacks="_defer_param_sync"
        ),
        affects=lambda run: (
            shares_gradient_buffer(run)
            and not run.overlap_param_gather
            and run.num_experts
            and expert_parallel(run) > 1
        ),
        when=f"{_SHARED}, without --overlap-param-gather, --num-experts and --expert-model-parallel-size > 1",
        instead=_NOT_SHARED,
        more_links=("NVIDIA/Megatron-LM#4982",),
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1, 0.17.1 and 0.18.2; its program; the scale of severities",
    ),
    Defect(
        id="ML-3007",
        effect="Each step shifts weights: they are read from the buffer as if it had no padding",
        severity=4,
        signs=Sign(
            f"{_BUFFER}:_ParamAndGradBucket.__init__",
            has="self.param_to_index[param] = (offset, offset + param.numel())",
        ),
        affects=shares_gradient_buffer,
        when=_SHARED,
        only_if="a parameter that is not the last of its bucket has a number of elements that is not a multiple of 64, "
        "as Mamba's or attention sinks may have",
        instead=_NOT_SHARED,
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1 and 0.17.1; its program",
    ),
    Defect(
        id="ML-4562",
        effect="Evaluation, and a checkpoint, use MXFP8 weights that are one step old",
        kind="wrong log",
        severity=2,
        signs=Sign(_START_SYNC, has="dist_all_gather_func(", lacks="self._post_param_sync()"),
        affects=lambda run: _gathers_late(run) and (_saves(run) or _evaluates(run)),
        when=f"{_SHARED}, --overlap-param-gather, and {_SAVES_OR_EVALUATES}",
        instead=_NOT_SHARED,
        state="fixed in 0.18.0, where ML-5236 takes its place at each save",
        evidence="read",
        second_reading="sources of 0.16.1 and 0.18.2, and of the trainer's saves and evaluations there; doctor with "
        "saves and evaluations",
    ),
    Defect(
        id="ML-6135a",
        effect="--fp4-format has no effect: with overlapped communication of experts all layers compute in half "
        "precision",
        severity=3,
        signs=Sign(
            "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan.get_fp8_context",
            has="self.layer.config.fp8",
            lacks="get_inner_quantization_context",
        ),
        affects=lambda run: run.fp4 and run.overlap_moe_expert_parallel_comm,
        when="--fp4-format with --overlap-moe-expert-parallel-comm",
        instead=WITHOUT_OVERLAP_OF_EXPERTS,
        state="fixed in 0.19.2, and after main of 2026-08-22",
        evidence="read",
        second_reading="sources of 0.18.2, 0.19.0 and main, and of the wheel of 0.19.2",
    ),
    Defect(
        id="ML-6135b",
        effect="The first MTP layer computes in half precision: with overlapped communication of experts it counts as "
        "the first layer of the model, which --first-last-layers-bf16 leaves out",
        severity=2,
        signs=Sign(
            "megatron.core.models.common.model_chunk_schedule_plan:TransformerLayerSchedulePlan.get_fp8_context",
            has="self.layer.config.fp8",
            lacks="get_inner_quantization_context",
        ),
        affects=lambda run: (
            run.fp8
            and run.fp8_recipe != "delayed"
            and run.first_last_layers_bf16
            and run.num_layers_at_start_in_bf16 != 0
            and run.mtp_num_layers
            and run.overlap_moe_expert_parallel_comm
        ),
        when="--fp8-format and --fp8-recipe other than delayed, with --first-last-layers-bf16, "
        "--num-layers-at-start-in-bf16 > 0 (as by default), --mtp-num-layers and --overlap-moe-expert-parallel-comm",
        instead=WITHOUT_OVERLAP_OF_EXPERTS,
        state="fixed in 0.19.2, and after main of 2026-08-22",
        evidence="read",
        second_reading="sources of 0.18.2, 0.19.0 and main, and of the wheel of 0.19.2",
    ),
    Defect(
        id="ML-2604",
        effect="--fp4-format has no effect in a hybrid model, which computes in half precision",
        severity=3,
        signs=Sign("megatron.core.ssm.mamba_block:MambaStack.forward", has="use_inner_fp8_context", lacks="fp4"),
        affects=lambda run: run.fp4 and is_hybrid(run),
        when="a hybrid model with --fp4-format",
        state="fixed in 0.17.0",
        evidence="read",
        second_reading="sources of 0.16.1 and 0.17.1",
    ),
    Defect(
        id="ML-3363",
        effect="fp8_dot_product_attention has no effect with NVFP4: attention computes in half precision",
        severity=1,
        signs=Sign("megatron.core.fp4_utils:", has="NVFP4BlockScaling()", lacks="fp8_dpa="),
        affects=lambda run: run.fp4 and run.fp8_dot_product_attention,
        when="--fp4-format with fp8_dot_product_attention of TransformerConfig, which has no flag",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1 and 0.17.1, for fp8 as well; the settings that have no flag",
    ),
    Defect(
        id="ML-4066",
        effect="fp8_dot_product_attention has no effect with MXFP8: attention computes in half precision",
        severity=1,
        signs=Sign("megatron.core.fp8_utils:", has="MXFP8BlockScaling(fp8_format=fp8_format)"),
        affects=lambda run: run.fp8 and run.fp8_recipe == "mxfp8" and run.fp8_dot_product_attention,
        when="--fp8-format with --fp8-recipe mxfp8, and with fp8_dot_product_attention of TransformerConfig, which "
        "has no flag",
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1, 0.17.1 and 0.18.2; the settings that have no flag",
    ),
    Defect(
        id="ML-6666",
        effect="The first step after a resume computes with weights that were quantized from the checkpoint's half "
        "precision, not from the main parameters",
        severity=1,
        signs=Sign(_DISTRIBUTED, lacks="quantize_and_sync_model_params_from_main_params"),
        affects=lambda run: (
            (run.fp8_param_gather or run.fp4_param_gather)
            and run.use_distributed_optimizer
            and loads_optimizer(run)
            and not run.use_megatron_fsdp
        ),
        when="--fp8-param-gather or --fp4-param-gather with --use-distributed-optimizer and --load, without "
        "--no-load-optim, --finetune and --use-megatron-fsdp",
        instead="leave out --fp8-param-gather, --fp4-param-gather and --reuse-grad-buf-for-mxfp8-param-ag",
        state="fixed after main of 2026-08-22",
        evidence="reported",
        second_reading="sources of 0.16.1, 0.18.2 and main; the pull request and its review",
    ),
)
