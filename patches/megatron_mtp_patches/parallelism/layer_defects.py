"""Tensor-parallel layers, their collectives and the loss that follows them."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import layers_of_hybrid
from ..defects.declare import Defect, Sign


def _keeps_residual_in_fp32(run: Any) -> bool:
    """True if the residual should be in float32 though the weights are not."""
    return bool(run.fp32_residual_connection and (run.bf16 or run.fp16))


def _fuses_norms(run: Any) -> bool:
    """True if each layer begins with TransformerEngine's norm and linear in one, as in GPT."""
    return run.transformer_impl != "local" and not layers_of_hybrid(run)


DEFECTS = (
    Defect(
        id="ML-5115",
        effect="The fused cross entropy of TransformerEngine before 2.18 keeps the gradient of the logits in half "
        "precision; users report diverging losses and gradient norms of 0",
        severity=4,
        signs=Sign(
            "megatron.core.models.common.language_module.language_module:LanguageModule.compute_language_model_loss",
            has="self.config.cross_entropy_fusion_impl == 'te'",
        ),
        affects=lambda run: (
            run.cross_entropy_loss_fusion and run.cross_entropy_fusion_impl == "te" and run.transformer_engine < (2, 18)
        ),
        when="--cross-entropy-loss-fusion with --cross-entropy-fusion-impl te and TransformerEngine before 2.18 (from "
        "0.18.2 on Megatron's own trainer refuses this, other trainers only warn)",
        instead="--cross-entropy-fusion-impl native",
        more_links=(
            "NVIDIA/Megatron-LM#1627",
            "NVIDIA/TransformerEngine#3193",
        ),
        state="fixed in TransformerEngine 2.18",
        evidence="reported",
        second_reading="sources of 0.18.2 and 0.19.0; title of the pull request",
    ),
    Defect(
        id="ML-3504",
        effect="--fp32-residual-connection has no effect: every layer casts the residual back to half precision",
        severity=3,
        signs=Sign(
            "megatron.core.fusions.fused_bias_dropout:_bias_dropout_add_func",
            has="residual = residual if residual.dtype == x.dtype else residual.to(x.dtype)",
        ),
        affects=lambda run: _keeps_residual_in_fp32(run) and not _fuses_norms(run),
        when="--fp32-residual-connection in a hybrid model or with --transformer-impl local",
        state="fixed in 0.17.0",
        evidence="read",
        second_reading="the fixing commit",
    ),
    Defect(
        id="ML-6272",
        effect="With TransformerEngine the first layer ends in an assertion, because its input is in float32 and its "
        "weights are not",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.extensions.transformer_engine:TELayerNormColumnParallelLinear.forward",
            lacks="if x.dtype != self.layer_norm_weight.dtype:",
        ),
        affects=lambda run: _keeps_residual_in_fp32(run) and _fuses_norms(run),
        when="GPT with --fp32-residual-connection and --transformer-impl transformer_engine",
        state="fixed on main",
        evidence="reported",
        second_reading="the fixing commit",
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
        when="--tensor-model-parallel-size > 1 without --sequence-parallel",
        only_if="a layer of your own reduces a tensor that is not contiguous in memory",
        state="fixed in 0.19.0",
        evidence="reproduced",
        patch="reduce-tensors-with-gaps",
        seen_by="copies",
        second_reading="source of 0.18.2; title of the fixing commit; its program",
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
        affects=lambda run: False,  # Megatron's specs fuse this norm with the projection behind it
        when="--norm-epsilon in hybrid models",
        only_if="a spec of your own gives MambaLayer a separate norm",
        state="fixed in 0.19.0",
        evidence="read",
        second_reading="the fixing commit",
    ),
)
