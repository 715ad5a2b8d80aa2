"""Muon and its family, and QK clipping."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    context_parallel,
    data_parallel,
    expert_data_parallel,
    has_megatron_fsdp,
    is_hybrid,
    is_layer_wise,
    tensor_parallel,
)
from ..defects.declare import Defect, Sign

_CLIP_QK = "megatron.core.optimizer.qk_clip:clip_qk"
_VISITS_DECODER = Sign(_CLIP_QK, has="model_chunk.module.module.decoder.layers")


def _clip_ends_in_error(run: Any) -> bool:
    """True if the run lacks what Megatron needs to scale a weight: whole main weights and whole query groups."""
    is_sharded = run.use_distributed_optimizer and "muon" not in str(run.optimizer)
    divides_groups = tensor_parallel(run) > 1 and not run.multi_latent_attention
    return bool(is_sharded or divides_groups or run.use_precision_aware_optimizer or run.attention_output_gate)


def _visit_ends_in_error(run: Any) -> bool:
    """True if the model is no GPT in the two wrappers of Megatron's DDP in half precision."""
    is_fp32 = not (run.bf16 or run.fp16)
    return is_hybrid(run) or is_fp32 != has_megatron_fsdp(run)  # Megatron-FSDP has a wrapper more


def _may_have_replicas(run: Any) -> bool:
    """True if several ranks have copies of a weight, or if no setting says how many ranks there are."""
    if not (run.world_size or run.data_parallel_size):
        return True
    return data_parallel(run) * context_parallel(run) > 1 or bool(run.num_experts and expert_data_parallel(run) > 1)


def _shards_gradients_of_whole_weights(run: Any) -> bool:
    """True if DDP reduces gradients for the distributed optimizer, and one that updates whole weights gets them.

    Arguments that validate_args of Megatron's trainer has read never say so.
    """
    updates_whole_weights = run.optimizer in ("muon", "adaptive_muon", "soap", "lion") and not is_layer_wise(run)
    return bool(updates_whole_weights and run.use_distributed_optimizer and not run.use_megatron_fsdp)


DEFECTS = (
    Defect(
        "ML-4113",
        "Muon updates whole weights although each rank has reduced only its own shard of their gradients, so the "
        "data-parallel replicas train different models",
        severity=5,
        signs=Sign(
            "megatron.core.optimizer:_get_megatron_emerging_optimizer",
            has=(
                "optimizer = FP32Optimizer(optimizer, config, init_state_fn)",
                "fallback_config.use_distributed_optimizer = False",
            ),
        ),
        affects=lambda run: _shards_gradients_of_whole_weights(run) and _may_have_replicas(run),
        when="--optimizer muon, adaptive_muon, soap or lion with --use-distributed-optimizer, in a trainer that does "
        "not turn them into the layer-wise optimizer as Megatron's does",
        introduced_by=("NVIDIA/Megatron-LM#4113",),
        evidence="reproduced",
        only_if="the run has several data-parallel ranks",
        instead="set use_distributed_optimizer to False in the configurations of DDP and of the optimizer",
        seen_by="copies",
        second_reading="sources of 0.17.1 to main; its program; doctor with muon, dist_muon and adam in Megatron's "
        "trainer",
    ),
    Defect(
        "ML-5394",
        "If the gradients of one module explode, clipping shrinks those of all others below the floor of "
        "Newton-Schulz, and Muon stops training them",
        severity=2,
        signs=Sign("megatron.core.optimizer.optimizer:MegatronOptimizer.clip_grad_norm"),
        fixed_by=Sign("megatron.core.optimizer.optimizer:MegatronOptimizer.skip_grad_norm_clip"),
        affects=lambda run: (
            "muon" in str(run.optimizer) and (run.clip_grad or 0.0) > 0.0 and not run.clip_orthogonalizing_optimizers
        ),
        when="--optimizer muon, adaptive_muon or dist_muon with --clip-grad above 0, as by default",
        more_links=("NVIDIA/Megatron-LM#5395",),
        state="open",
        evidence="reproduced",
        only_if="the gradients of one module are many orders of magnitude larger than those of the others",
        patch="exempt-muon-from-clipping",
        second_reading="sources of 0.16.1 to main; the issue and the pull request; doctor with Muon and Adam; its "
        "program",
    ),
    Defect(
        "EO-238",
        "Muon's update shrinks with the gradient where the norm of a matrix is below about 1e-9",
        severity=2,
        signs=Sign(
            "emerging_optimizers.orthogonalized_optimizers.muon_utils:newton_schulz", lacks="normalize_in_double"
        ),
        affects=lambda run: "muon" in str(run.optimizer),
        when="--optimizer muon, adaptive_muon or dist_muon",
        more_links=("NVIDIA-NeMo/Emerging-Optimizers#229", "NVIDIA-NeMo/Emerging-Optimizers#230"),
        state="fixed in emerging-optimizers 0.4.0",
        evidence="reproduced",
        only_if="the gradient of a matrix has a norm below 1e-9",
        patch="keep-newton-schulz-scale-invariant",
        second_reading="sources of emerging-optimizers 0.3.0, 0.3.1 and 0.4.0; the issue and both pull requests; "
        "doctor with Muon and Adam; its program",
    ),
    Defect(
        "ML-gated-qkv",
        "Muon orthogonalizes rows of query, gate, key and value together, or its first step raises an error",
        severity=4,
        signs=(
            Sign("megatron.core.optimizer.emerging_optimizers:_get_qkv_split_shapes", lacks="'attention_output_gate'"),
            Sign("megatron.core.optimizer.muon:get_megatron_muon_optimizer", has="'split_qkv': config.muon_split_qkv"),
        ),
        affects=lambda run: (
            run.attention_output_gate and "muon" in str(run.optimizer) and run.muon_split_qkv is not False
        ),
        when="--attention-output-gate with --optimizer muon, adaptive_muon or dist_muon, and muon_split_qkv, as by "
        "default",
        more_links=("NVIDIA/Megatron-LM#4728",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        instead="--muon-no-split-qkv, with which Muon orthogonalizes the whole weight as one matrix",
        patch="split-gated-qkv-for-muon",
        second_reading="the fixing commit; sources of 0.16.1 to 0.19.0; its program; doctor with --muon-no-split-qkv "
        "and adaptive_muon",
    ),
    Defect(
        "ML-4646",
        "A step in which --qk-clip scales a weight ends in an error; in a hybrid model, in fp32 and with Megatron-FSDP "
        "in half precision the first step does, with --log-max-attention-logit as well",
        kind="crash",
        severity=3,
        signs=_VISITS_DECODER,
        affects=lambda run: (
            (run.qk_clip and _clip_ends_in_error(run))
            or ((run.qk_clip or run.log_max_attention_logit) and _visit_ends_in_error(run))
        ),
        when="--qk-clip with --use-distributed-optimizer (but for Muon), --use-precision-aware-optimizer, "
        "--tensor-model-parallel-size > 1 (but for --multi-latent-attention) or --attention-output-gate; --qk-clip or "
        "--log-max-attention-logit in a hybrid model, in fp32, or with --use-megatron-fsdp in bf16 or fp16",
        more_links=("NVIDIA/Megatron-LM#7382",),
        state="open",
        evidence="reproduced",
        only_if="a largest logit is over --qk-clip-threshold (hybrid and fp32 models, Megatron-FSDP: always)",
        patch="clip-qk-of-all-layers",
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main; the pull request #7382; doctor with and without "
        "tensor parallelism; its program",
    ),
    Defect(
        "qk-clip-heads",
        "QK clipping leaves out the attention of MTP layers, however large its logits are",
        severity=3,
        signs=_VISITS_DECODER,
        affects=lambda run: run.qk_clip and run.mtp_num_layers,
        when="--qk-clip with --mtp-num-layers",
        evidence="reproduced",
        only_if="the largest logit of an attention head of an MTP layer is over --qk-clip-threshold",
        patch="clip-qk-of-all-layers",
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main; doctor with and without MTP heads; its program",
    ),
    Defect(
        "qk-clip-negative-logits",
        "An attention head whose largest logit is negative gets weights of NaN as soon as QK clipping scales another "
        "head of its layer",
        severity=3,
        signs=Sign(
            "megatron.core.transformer.attention:SelfAttention.clip_qk",
            has="torch.clamp(self.config.qk_clip_threshold / grouped_max_attn_logits, max=1.0)",
        ),
        affects=lambda run: run.qk_clip,
        when="--qk-clip",
        more_links=("NVIDIA/Megatron-LM#7382",),
        state="open",
        evidence="reproduced",
        only_if="all logits of a head, or of all heads of a query group, are negative in a step",
        patch="clip-qk-of-all-layers",
        seen_by="finite",
        second_reading="sources of 0.16.1, 0.18.2 and main, of MLA as well; the pull request; its program; the scale "
        "of severities",
    ),
    Defect(
        "qk-clip-validation",
        "Logits of a validation count as those of the next training step: QK clipping clips weights for them, and the "
        "logged maximum has them",
        severity=2,
        signs=_VISITS_DECODER,
        affects=lambda run: (
            (run.qk_clip or run.log_max_attention_logit) and run.eval_interval and (run.eval_iters or 0) > 0
        ),
        when="--qk-clip or --log-max-attention-logit with validation between steps (--eval-interval, --eval-iters > 0)",
        evidence="reproduced",
        only_if="a logit of the validation is larger than those of the step",
        patch="clip-qk-of-all-layers",
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main and of their trainers; its program",
    ),
    Defect(
        "attention-logit-of-last-rank",
        "The logged maximum of the attention logits is that of the attention heads and layers of the last rank alone",
        kind="wrong log",
        severity=1,
        signs=_VISITS_DECODER,
        affects=lambda run: (
            run.log_max_attention_logit
            and (run.tensor_model_parallel_size or 1) * (run.pipeline_model_parallel_size or 1) > 1
        ),
        when=("--log-max-attention-logit with --tensor-model-parallel-size > 1 or --pipeline-model-parallel-size > 1"),
        evidence="reproduced",
        patch="clip-qk-of-all-layers",
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main and what their trainers log; its program",
    ),
    Defect(
        id="ML-5067",
        effect=(
            "The logged maximum of the attention logits is that of all steps so far, and memory grows, because each "
            "microbatch's maximum keeps its graph"
        ),
        kind="wrong log",
        severity=2,
        signs=Sign(
            "megatron.core.optimizer.qk_clip:clip_qk",
            has="log_max_attention_logit = max(",
            lacks="current_max_attn_logits = None",
        ),
        affects=lambda run: run.log_max_attention_logit and not run.qk_clip,
        when="--log-max-attention-logit without --qk-clip",
        more_links=("NVIDIA/Megatron-LM#4699",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="clip-qk-of-all-layers",
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main; doctor with --log-max-attention-logit on 0.17.1 to "
        "0.19.2; its program",
    ),
)
