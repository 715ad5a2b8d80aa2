"""QK clipping, and the largest logit of attention."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    graph_scopes,
    has_megatron_fsdp,
    has_sparse_attention,
    layers_of_hybrid,
    pipeline_parallel,
    tensor_parallel,
)
from ..defects.declare import Defect, Gap, Sign

_CLIP_QK = "megatron.core.optimizer.qk_clip:clip_qk"
_VISITS_DECODER = Sign(_CLIP_QK, has="model_chunk.module.module.decoder.layers")
_MODELS = (
    "in a model with TransformerEngine's attention and without Mamba layers and sparse attention "
    "(--experimental-attention-variant dsa), but not in verl and ms-swift, which do not clip"
)
_READABLE = f"in bf16 or fp16 (with --use-megatron-fsdp in fp32 instead, but for --megatron-fsdp-version 2), {_MODELS}"


def _captures_attention(run: Any) -> bool:
    """True if CUDA graphs replay attention; without a scope they replay whole layers."""
    is_captured = not graph_scopes(run) or not graph_scopes(run).isdisjoint({"full", "full_iteration", "attn"})
    is_on = (run.cuda_graph_impl or "none") != "none" and is_captured
    return bool(is_on or run.enable_cuda_graph or run.external_cuda_graph)


def _is_refused(run: Any) -> bool:
    is_sharded = run.use_megatron_fsdp or run.use_torch_fsdp2
    is_refused = is_sharded or run.overlap_param_gather_with_optimizer_step or run.trains_adapters
    return bool(run.qk_clip and (is_refused or _captures_attention(run)))


def _is_refused_or_reports_no_logits(run: Any) -> bool:
    return bool(_is_refused(run) or (run.qk_clip and (run.transformer_impl == "local" or has_sparse_attention(run))))


_REFUSED = Gap(
    _is_refused,
    when="--qk-clip and --use-megatron-fsdp, --use-torch-fsdp2, --overlap-param-gather-with-optimizer-step, CUDA "
    "graphs of attention (--cuda-graph-impl other than none, where the modules or scope have it or are empty) or "
    "adapters of Megatron-Bridge",
    because="it refuses these settings together",
)
_ALSO_WITHOUT_LOGITS = Gap(
    _is_refused_or_reports_no_logits,
    when=f"{_REFUSED.when}, --transformer-impl local or sparse attention (--experimental-attention-variant dsa)",
    because=_REFUSED.because,
)


def _clips(run: Any) -> bool:
    """True if QK clipping acts; the trainers of verl and ms-swift never call it."""
    return bool(run.qk_clip and not (run.is_of_verl or run.is_of_ms_swift))


def _logs_maximum(run: Any) -> bool:
    """True if the largest logit is looked up for the log; Megatron-Bridge does that only where it clips."""
    is_asked = run.qk_clip if run.is_of_megatron_bridge else run.log_max_attention_logit
    return bool(is_asked and not (run.is_of_verl or run.is_of_ms_swift))


def _has_mamba_layers(run: Any) -> bool:
    """True if the main model has Mamba layers, which have no attention to ask for logits."""
    layers = layers_of_hybrid(run).partition("/")[0]
    return "M" in layers if layers else bool(run.is_hybrid_model)


def _is_in_two_wrappers(run: Any) -> bool:
    """True if the model is in two wrappers, as in Megatron's DDP in half precision; Megatron-FSDP has a wrapper more.

    That of `--megatron-fsdp-version 2` has not.
    """
    return bool(run.bf16 or run.fp16) != has_megatron_fsdp(run)


def _logits_are_read(run: Any) -> bool:
    """True if all layers of the main model are visited without an error, and those of attention have logits."""
    is_of_te = (run.transformer_impl or "transformer_engine") == "transformer_engine"
    return bool(is_of_te and not (has_sparse_attention(run) or _visit_ends_in_error(run)))


def _clip_ends_in_error(run: Any) -> bool:
    """True if the run lacks what Megatron needs to scale a weight: whole main weights and whole query groups."""
    is_sharded = run.use_distributed_optimizer and run.optimizer in (None, "adam", "sgd")  # others are layer-wise
    divides_groups = tensor_parallel(run) > 1 and not run.multi_latent_attention
    return bool(is_sharded or divides_groups or run.use_precision_aware_optimizer or run.attention_output_gate)


def _visit_ends_in_error(run: Any) -> bool:
    """True if a layer has no attention, or the decoder is not below two wrappers."""
    return _has_mamba_layers(run) or not _is_in_two_wrappers(run)


DEFECTS = (
    Defect(
        "ML-4646",
        "A step in which --qk-clip scales a weight ends in an error; in a model with Mamba layers, in fp32 and with "
        "Megatron-FSDP in half precision the first step does, with --log-max-attention-logit as well",
        kind="crash",
        severity=3,
        signs=_VISITS_DECODER,
        affects=lambda run: (
            (_clips(run) and _clip_ends_in_error(run))
            or ((_clips(run) or _logs_maximum(run)) and _visit_ends_in_error(run))
        ),
        when="--qk-clip with --use-distributed-optimizer (with --optimizer adam or sgd), "
        "--use-precision-aware-optimizer, --tensor-model-parallel-size > 1 (but for --multi-latent-attention) or "
        "--attention-output-gate; --qk-clip or --log-max-attention-logit in a model with Mamba layers, in fp32, or "
        "with --use-megatron-fsdp in bf16 or fp16 (--megatron-fsdp-version 2: in fp32); but not in verl and ms-swift, "
        "which do not clip",
        more_links=("NVIDIA/Megatron-LM#7382",),
        state="open",
        evidence="reproduced",
        only_if="a largest logit is over --qk-clip-threshold (Mamba layers, fp32 models, Megatron-FSDP: always)",
        patch="clip-qk-of-all-layers",
        unless=_ALSO_WITHOUT_LOGITS,
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main, their wrappers, and which trainers clip; both pull "
        "requests; what the patch refuses, at the start and in the first step; doctor with and without tensor "
        "parallelism; its program",
    ),
    Defect(
        "qk-clip-heads",
        "QK clipping leaves out the attention of MTP layers, however large its logits are",
        severity=3,
        signs=_VISITS_DECODER,
        affects=lambda run: _clips(run) and run.mtp_num_layers and _logits_are_read(run),
        when=f"--qk-clip with --mtp-num-layers, {_READABLE}",
        evidence="reproduced",
        only_if="the largest logit of an attention head of an MTP layer is over --qk-clip-threshold",
        patch="clip-qk-of-all-layers",
        unless=_REFUSED,
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main, their wrappers, DSA, and which trainers clip; what "
        "the patch refuses, CUDA graphs among it; doctor with and without MTP heads; its program",
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
        affects=lambda run: (
            _clips(run) and _logits_are_read(run) and not (run.use_megatron_fsdp or _clip_ends_in_error(run))
        ),
        when=f"--qk-clip without --use-megatron-fsdp in bf16 or fp16, {_MODELS}, and where clipping does not end in an "
        "error (ML-4646)",
        more_links=("NVIDIA/Megatron-LM#7517", "NVIDIA/Megatron-LM#7382"),
        state="open",
        evidence="reproduced",
        only_if="all logits of a head, or of all heads of a query group, are negative in a step",
        patch="clip-qk-of-all-layers",
        unless=_REFUSED,
        seen_by="finite",
        second_reading="sources of 0.16.1, 0.18.2 and main, of MLA as well, and which trainers clip; both pull "
        "requests, of which #7517 is open; what the patch refuses; its program; the scale of severities",
    ),
    Defect(
        "qk-clip-validation",
        "Logits of a validation count as those of the next training step: QK clipping clips weights for them, and the "
        "logged maximum has them",
        severity=2,
        signs=_VISITS_DECODER,
        affects=lambda run: (
            (_clips(run) or _logs_maximum(run))
            and run.eval_interval
            and (run.eval_iters or 0) > 0
            and _logits_are_read(run)
        ),
        when="--qk-clip or --log-max-attention-logit with validation between steps (--eval-interval, --eval-iters > "
        f"0), {_READABLE}",
        evidence="reproduced",
        only_if="a logit of the validation is larger than those of the step",
        patch="clip-qk-of-all-layers",
        unless=_REFUSED,
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main, of their trainers and of those of frameworks; what "
        "the patch refuses; its program",
    ),
    Defect(
        "attention-logit-of-last-rank",
        "The logged maximum of the attention logits is that of the attention heads and layers of the last rank alone",
        kind="wrong log",
        severity=1,
        signs=_VISITS_DECODER,
        affects=lambda run: (
            _logs_maximum(run)
            and (run.tensorboard_dir or run.is_of_megatron_bridge)
            and tensor_parallel(run) * pipeline_parallel(run) > 1
            and _logits_are_read(run)
        ),
        when="--log-max-attention-logit and --tensorboard-dir, or qk_clip in Megatron-Bridge, with "
        f"--tensor-model-parallel-size > 1 or --pipeline-model-parallel-size > 1, {_READABLE}",
        evidence="reproduced",
        patch="clip-qk-of-all-layers",
        unless=_REFUSED,
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main, what their trainers and Megatron-Bridge's log, and "
        "where; what the patch refuses; its program",
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
        affects=lambda run: _logs_maximum(run) and not run.qk_clip and _logits_are_read(run),
        when=f"--log-max-attention-logit without --qk-clip, {_READABLE}, and not in Megatron-Bridge",
        more_links=("NVIDIA/Megatron-LM#4699",),
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="clip-qk-of-all-layers",
        second_reading="sources of 0.16.1, 0.18.2, 0.19.0 and main, and which trainers log it; doctor with "
        "--log-max-attention-logit on 0.17.1 to 0.19.2; its program",
    ),
)
