"""Gradient norms, clipping and skipped updates."""

from __future__ import annotations

import math
from typing import Any

from ..defects.conditions import has_latent_attention, has_megatron_fsdp, is_layer_wise, tensor_parallel, type_name
from ..defects.declare import Defect, Diff, Gap, Sign

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_SKIP = "grad_norm > grad_norm_skip_threshold"
_SKIPS_IN_CHAIN = (
    Sign(f"{_OPTIMIZER}:ChainedOptimizer.step", has=_SKIP),
    Sign(f"{_OPTIMIZER}:ChainedOptimizer.step", has="grad_norm > optimizer.config.grad_norm_skip_threshold"),
)
_LAYERS = "megatron.core.tensor_parallel.layers"
# Megatron's trainer has no flag for it.
_THRESHOLD = "OptimizerConfig.grad_norm_skip_threshold (--grad-norm-skip-threshold, which comes with the patch)"
_REFUSES_CUDA_GRAPH = Gap(
    lambda run: run.optimizer_cuda_graph,
    when="--optimizer-cuda-graph",
    because="it refuses that flag with a threshold",
)


def _has_threshold(run: Any) -> bool:
    threshold = run.grad_norm_skip_threshold
    return threshold is not None and math.isfinite(threshold)


def _has_duplicated_layers(run: Any) -> bool:
    """True if TransformerEngine has layers of which each tensor-parallel rank has a copy."""
    has_latent_experts = run.num_experts and run.moe_latent_size
    return bool(tensor_parallel(run) > 1 and (has_latent_attention(run) or has_latent_experts))


def _may_have_norm_of_nan(run: Any) -> bool:
    """True if nothing looks for NaN before the gradient norm: neither the loss scaler nor Megatron's check."""
    has_scaler = run.fp16 or (isinstance(run.loss_scale, (int, float)) and run.loss_scale)  # ms-swift's is another one
    return not (has_scaler or run.check_for_nan_in_loss_and_grad or run.check_for_nan_in_grad)


def _measures_half_precision(run: Any) -> bool:
    """True if the optimizer gets the gradients of parameters in half precision as DDP has them, in half precision."""
    is_read_as_it_is = (
        (run.fp8_recipe or "delayed") == "delayed"
        or run.optimizer_cpu_offload
        or type_name(run.main_params_dtype) == "float16"
    )
    if run.accumulate_allreduce_grads_in_fp32 or run.grad_reduce_in_fp32 or not is_read_as_it_is:
        return False
    is_reduced_in_16_bits = run.grad_reduce_in_bf16 or run.fp16 or (run.bf16 and run.grad_reduce_in_fp32 is False)
    return bool(type_name(run.main_grads_dtype) == "bfloat16" or is_reduced_in_16_bits)


_HELPER = "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper"


DEFECTS = (
    Defect(
        "ML-3460",
        "Ranks that own no main parameters take the update that the others skip, and hang or diverge",
        kind="hang",
        severity=3,
        signs=_SKIPS_IN_CHAIN,
        affects=lambda run: _has_threshold(run) and not run.use_megatron_fsdp,  # ML-3460c
        when=f"{_THRESHOLD}, without --use-megatron-fsdp",
        introduced_by=("NVIDIA/Megatron-LM#3460",),
        evidence="reproduced",
        only_if="a rank owns no main parameters",
        patch="skip-update-on-large-grad-norm",
        unless=_REFUSES_CUDA_GRAPH,
        seen_by="copies",
        second_reading="sources of 0.18.2, 0.19.0 and main, and which optimizers skip there; its program; the scale of "
        "severities",
    ),
    Defect(
        "ML-3460b",
        "An update whose gradient norm is NaN is not skipped",
        severity=3,
        signs=_SKIPS_IN_CHAIN,
        affects=lambda run: _has_threshold(run) and _may_have_norm_of_nan(run) and not run.use_megatron_fsdp,
        when=f"{_THRESHOLD} with --no-check-for-nan-in-loss-and-grad, without which the run ends before the update, "
        "and without --fp16, --loss-scale and --use-megatron-fsdp",
        instead="leave out --no-check-for-nan-in-loss-and-grad",
        introduced_by=("NVIDIA/Megatron-LM#3460",),
        evidence="reproduced",
        patch="skip-update-on-large-grad-norm",
        unless=_REFUSES_CUDA_GRAPH,
        seen_by="finite",
        second_reading="sources of 0.18.2, 0.19.0 and main, and what looks for NaN there before the update; its "
        "program",
    ),
    Defect(
        "ML-3460c",
        "Megatron-FSDP ignores --grad-norm-skip-threshold",
        severity=3,
        signs=_SKIPS_IN_CHAIN,
        affects=lambda run: (  # with virtual stages it has an optimizer for each, and the chain of them skips
            _has_threshold(run) and has_megatron_fsdp(run) and (run.virtual_pipeline_model_parallel_size or 1) == 1
        ),
        when=f"{_THRESHOLD} with --use-megatron-fsdp, without virtual stages",
        introduced_by=("NVIDIA/Megatron-LM#3460",),
        evidence="reproduced",
        patch="skip-update-on-large-grad-norm",
        unless=_REFUSES_CUDA_GRAPH,
        second_reading="sources of 0.18.2, 0.19.0 and main, and the optimizers that Megatron-FSDP has there; its "
        "program",
    ),
    Defect(
        "ML-4116",
        "Ranks clip the MTP layers by different norms, because that norm is reduced over the wrong ranks",
        severity=4,
        signs=Sign(f"{_OPTIMIZER}:copy_optimizer_param_metadata"),
        affects=lambda run: (
            run.mtp_detach_heads
            and is_layer_wise(run)
            and run.use_layer_wise_param_layout is not False
            and run.clip_grad != 0
        ),
        when="--mtp-detach-heads with --clip-grad above 0, as by default, and --optimizer dist_muon or "
        "use_layer_wise_distributed_optimizer, which Megatron's trainer sets where another optimizer than Adam and SGD "
        "has the distributed optimizer, without --no-use-layer-wise-param-layout",
        only_if="the run has several data-parallel ranks, and Megatron is newer than 0.19, whose pretrain_gpt.py, "
        "pretrain_hybrid.py and train_rl.py lay parameters out as before",
        instead="--no-use-layer-wise-param-layout",
        introduced_by=("NVIDIA/Megatron-LM#4116",),
        evidence="reproduced",
        patch="clip-mtp-grads-separately",
        seen_by="norm",
        second_reading="sources of 0.19.0 and main, what sets the layer-wise optimizer there and over which ranks it "
        "reduces norms; its program, also with its way out; doctor with muon and --use-distributed-optimizer",
    ),
    Defect(
        "ML-4116b",
        "The MTP layers and the main model are clipped by one norm of both, because Megatron-FSDP loses the tag that "
        "keeps them apart",
        severity=3,
        signs=Sign(f"{_OPTIMIZER}:copy_optimizer_param_metadata"),
        affects=lambda run: run.mtp_detach_heads and has_megatron_fsdp(run) and run.clip_grad != 0,
        when="--mtp-detach-heads with --use-megatron-fsdp and --clip-grad above 0, as by default",
        introduced_by=("NVIDIA/Megatron-LM#4116",),
        evidence="reproduced",
        patch="clip-mtp-grads-separately",
        seen_by="norm",
        second_reading="sources of 0.19.0 and main; predicate with Megatron-FSDP 2; its program",
    ),
    Defect(
        "ML-7338",
        "The norm of gradients in bf16 and fp32 is wrong, and clipping (--clip-grad above 0, as by default) changes "
        "some of them wrongly, because a kernel reads all of them in the dtype of the first; or the step ends in an "
        "illegal memory access",
        severity=3,
        signs=Sign("megatron.core.optimizer.clip_grads:get_grad_norm_fp32", has="[grads_for_norm], False"),
        affects=lambda run: (  # Megatron-FSDP does not read it
            run.use_precision_aware_optimizer and _measures_half_precision(run) and not run.use_megatron_fsdp
        ),
        when="--use-precision-aware-optimizer with gradients in half precision (--main-grads-dtype bf16, "
        "--grad-reduce-in-bf16, or --fp16 without --accumulate-allreduce-grads-in-fp32), without --use-megatron-fsdp, "
        "and without a --fp8-recipe other than delayed unless with --optimizer-cpu-offload or --main-params-dtype fp16",
        only_if="the model keeps some parameters in fp32",
        instead="reduce gradients in fp32: with --accumulate-allreduce-grads-in-fp32, without --main-grads-dtype bf16 "
        "and --grad-reduce-in-bf16",
        more_links=("NVIDIA/Megatron-LM#7279",),
        state="open",
        evidence="reproduced",
        patch="read-gradients-in-their-dtype",
        seen_by="norm",
        second_reading="sources of 0.16.1, 0.19.0 and main and what decides the dtype of gradients there; the issue "
        "and the pull request; predicate with Megatron-FSDP; its program, also without --main-grads-dtype",
    ),
    Defect(
        "ML-5530",
        "The largest gradient as the norm ends in a ValueError on ranks without gradients that count",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.optimizer.clip_grads:get_grad_norm_fp32",
            has="total_norm = max((grad.abs().max() for grad in grads_for_norm))",
        ),
        affects=lambda run: False,  # Megatron asks for the 2-norm
        when="get_grad_norm_fp32 with norm_type=inf, for which Megatron itself does not ask",
        only_if="a rank trains no parameter",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="sources of 0.16.1, 0.18.2 and 0.19.0, and who asks for a norm; the fixing commit; its program",
    ),
    Defect(
        id="ML-4084",
        effect="The gradient norm is too small, and gradients are clipped too little: it counts only the first "
        "tensor-parallel rank's part of the embedding and the output layer (with --transformer-impl local, of all "
        "linear layers)",
        severity=4,
        signs=Sign(
            f"{_LAYERS}:VocabParallelEmbedding.__init__",
            has="if config.perform_initialization:",
            lacks="set_tensor_model_parallel_attributes",
        ),
        affects=lambda run: run.perform_initialization is False and tensor_parallel(run) > 1 and run.clip_grad != 0,
        when="--no-initialization (perform_initialization=False) with --tensor-model-parallel-size > 1 and --clip-grad "
        "above 0, as by default",
        instead="leave out --no-initialization",
        state="fixed in 0.18.0",
        evidence="reproduced",
        patch="count-uninitialized-shards",
        seen_by="norm",
        second_reading="sources of 0.16.1 to 0.18.2; its program; doctor with --no-initialization on 0.17.1 to 0.19.2",
    ),
    Defect(
        id="ML-3213",
        effect="The gradient norm counts the down projections of MLA and the latent projections of experts once for "
        "each tensor-parallel rank, so gradients are clipped too much",
        severity=3,
        signs=Sign(
            "megatron.core.extensions.transformer_engine:TELinear.__init__",
            has="parallel_mode == 'duplicated'",
            lacks="'tensor_model_parallel', False",
        ),
        affects=lambda run: _has_duplicated_layers(run) and run.clip_grad != 0,
        when="--tensor-model-parallel-size > 1 with --clip-grad above 0, as by default, and with "
        "--multi-latent-attention in a GPT (not with --transformer-impl local) or --num-experts and --moe-latent-size",
        state="fixed in 0.17.0",
        evidence="reproduced",
        patch="count-duplicated-weights-once",
        diff=Diff(
            "megatron.core.extensions.transformer_engine:TELinear.__init__",
            """
            if parallel_mode == "duplicated":  # TransformerEngine marks its weights as shards
                param.tensor_model_parallel = False
            """,
            "inside",
            "self.parameters()",
        ),
        seen_by="norm",
        second_reading="sources of 0.16.1 and 0.17.1, and which layers are duplicated there; the fixing commit; its "
        "program",
    ),
    Defect(
        "mtp-loss-of-skipped-steps",
        "After a step that the loss scaler of fp16 skipped, the MTP losses in the log are too large: their sum has the "
        "skipped step, but it is divided by the number of the other steps",
        kind="wrong log",
        severity=1,
        signs=Sign(f"{_HELPER}.track_mtp_metrics", has="total_loss_dict"),
        affects=lambda run: run.mtp_num_layers and run.fp16 and run.log_interval != 1,
        when="--mtp-num-layers with --fp16 and --log-interval above 1, as by default",
        instead="--log-interval 1",
        evidence="reproduced",
        patch="skip-update-on-large-grad-norm",
        second_reading="sources of 0.18.2 and 0.19.0; the counters of the trainers of 0.16.1 to main, also with "
        "--log-interval 1; its program",
    ),
)
