"""Tensor-parallel layers, their collectives and the loss that follows them."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import is_hybrid, layers_of_hybrid, type_name
from ..defects.declare import Defect, Diff, Sign


def _keeps_residual_in_fp32(run: Any) -> bool:
    """True if the residual should be in float32 though the weights are not; other layers than these end in an error."""
    has_transformer_engine = run.transformer_impl != "local"
    return bool(run.fp32_residual_connection and (run.bf16 or run.fp16) and has_transformer_engine)


def _fuses_norm_of_residual(run: Any) -> bool:
    """True if a norm that gets the residual in float32 is one with the linear layer behind it.

    In 0.16 only the first layer of a model gets it.
    """
    if is_hybrid(run):
        kinds = layers_of_hybrid(run)
        return any(kind in "*-G" for kind in (kinds if run.hybrid_layer_pattern else kinds[:1]))
    if not run.multi_latent_attention:
        return True
    is_of_0_16 = run.mla_down_proj_fusion is None  # it has no such setting
    return not is_of_0_16 and bool(_has_dense_layers(run) or run.mla_down_proj_fusion)


def _has_dense_layers(run: Any) -> bool:
    frequency = run.moe_layer_freq or 1
    has_some = 0 in frequency if isinstance(frequency, list) else frequency > 1
    return not run.num_experts or has_some


DEFECTS = (
    Defect(
        id="ML-5115",
        effect="The fused cross entropy of TransformerEngine before 2.18 keeps the gradient of the logits in half "
        "precision; users report diverging losses",
        severity=4,
        signs=Sign(
            "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
            has="self.config.cross_entropy_fusion_impl == 'te'",
        ),
        affects=lambda run: (
            run.cross_entropy_loss_fusion
            and run.cross_entropy_fusion_impl == "te"
            and (run.bf16 or run.fp16)
            and type_name(run.logit_dtype) != "float32"
            and run.transformer_engine < (2, 18)
        ),
        when="--cross-entropy-loss-fusion with --cross-entropy-fusion-impl te and --bf16 or --fp16, and "
        "TransformerEngine before 2.18 (from 0.18.2 on Megatron's own trainer refuses this, other trainers only warn), "
        "without logits in fp32 (logit_dtype of main)",
        instead="--cross-entropy-fusion-impl native",
        more_links=(
            "NVIDIA/Megatron-LM#1627",
            "NVIDIA/TransformerEngine#3193",
        ),
        state="fixed in TransformerEngine 2.18",
        evidence="reported",
        second_reading="the loss, and what trainers refuse, of 0.16.1 to main; the kernel of TransformerEngine 2.17; "
        "logits in fp32 on main; the threads of #5115 and of TransformerEngine's #3193; doctor under its flags",
    ),
    Defect(
        id="ML-3504",
        effect="--fp32-residual-connection has no effect: the first layer casts the residual back to half precision",
        severity=3,
        signs=Sign(
            "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func",
            has="residual = residual if residual.dtype == x.dtype else residual.to(x.dtype)",
        ),
        affects=lambda run: _keeps_residual_in_fp32(run) and not _fuses_norm_of_residual(run),
        when="--fp32-residual-connection in a GPT with --multi-latent-attention, or in a hybrid model "
        "(--hybrid-override-pattern) whose first layer is a Mamba or a MoE layer",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="layers, their specs and the addition of residuals of 0.16.1 and 0.17.1; norms of "
        "TransformerEngine 2.17; a GPT with --transformer-impl local on 0.16.1 to 0.19.2, which ends in an error",
    ),
    Defect(
        id="ML-6272",
        effect="The first of TransformerEngine's layers that begins with a norm of the residual ends in an error about "
        "data types, because the residual is in float32 and its weights are not",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward",
            lacks="if x.dtype != self.layer_norm_weight.dtype:",
        ),
        affects=lambda run: _keeps_residual_in_fp32(run) and _fuses_norm_of_residual(run),
        when="--fp32-residual-connection with --transformer-impl transformer_engine, in a GPT without "
        "--multi-latent-attention, or from 0.17 on with it, if there are dense layers or --mla-down-proj-fusion; or in "
        "a hybrid model with attention, MLP or GatedDeltaNet layers (in 0.16, as its first layer)",
        instead="leave out --fp32-residual-connection",
        state="fixed on main",
        evidence="reproduced",
        second_reading="layers and their specs of 0.16.1, 0.17.1, 0.19.0 and main; linear layers and norms of "
        "TransformerEngine 2.17; doctor in a GPT, with MLA and in hybrid models",
    ),
    Defect(
        id="ML-5338",
        effect="An all-reduce over tensor-parallel ranks returns its input unreduced, so each rank goes on with its "
        "own part of the sum",
        severity=3,
        signs=Sign(
            "megatron.core.tensor_parallel.mappings:_reduce",
            has="torch.distributed.all_reduce(input_.contiguous(), group=group)",
        ),
        affects=lambda run: False,  # no layer of Megatron's is known that does it, and no setting tells of others
        when="--tensor-model-parallel-size > 1",
        only_if="a layer of your own reduces a tensor that is not contiguous in memory",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="reduce-tensors-with-gaps",
        diff=Diff(
            "megatron.core.tensor_parallel.mappings:_reduce",
            "input_ = input_.contiguous()",
            "before",
            "torch.distributed.all_reduce",
        ),
        seen_by="copies",
        second_reading="collectives of 0.16.1, 0.18.2 and 0.19.0, which do not ask for sequence parallelism, and who "
        "calls them; its program on 0.18.2",
    ),
    Defect(
        id="ML-5750",
        effect="The norm before a Mamba layer has the epsilon of its class and not --norm-epsilon",
        severity=2,
        signs=Sign(
            "megatron.core.ssm.mamba_layer:MambaLayer.__init__",
            has="self.norm = ",
            lacks="eps=self.config.layernorm_epsilon",
        ),
        affects=lambda run: (  # the spec of ModelOpt has a separate norm; others fuse it with a projection
            (is_hybrid(run) and "M" in (layers_of_hybrid(run) or "M"))
            and (run.modelopt_enabled or run.export_kd_teacher_load)
            and not run.export_default_te_spec
            and (run.layernorm_epsilon or run.norm_epsilon or 1e-5) != 1e-5
        ),
        when="--modelopt-enabled or --export-kd-teacher-load in hybrid models with Mamba layers, without "
        "--export-default-te-spec, with --norm-epsilon other than 1e-5",
        state="fixed in 0.19.0",
        evidence="reproduced",
        second_reading="Mamba layers, their specs and ModelOpt's builder of 0.16.1, 0.17.1, 0.18.2 and 0.19.0",
    ),
)
