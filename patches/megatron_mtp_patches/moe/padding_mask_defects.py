"""Padding masks: which routers get none, get that of other ranks' tokens as well, or end in an error with one."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    HAS_PADDING_MASK,
    balances_by_quantiles,
    has_any_aux_loss,
    has_z_loss,
    heads_have_experts,
    layers_of_hybrid,
    may_mask_padding,
    pipeline_parallel,
    tensor_parallel,
)
from ..defects.declare import Defect, Sign

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_READS_MASK = "--moe-aux-loss-coeff, --moe-z-loss-coeff or --moe-router-enable-expert-bias"


def _reads_mask(run: Any) -> bool:
    """True if the model may get a padding mask, and routers do something with it."""
    has_reader = has_any_aux_loss(run) or has_z_loss(run) or run.num_experts and run.moe_router_enable_expert_bias
    return may_mask_padding(run) and bool(has_reader)


def _splits_mask(run: Any) -> bool:
    """True if a rank has a part of each sequence, and routers want the mask of this part."""
    return bool(_reads_mask(run) and run.sequence_parallel and tensor_parallel(run) > 1)


DEFECTS = (
    Defect(
        id="overlap-padding-mask",
        effect="Routers count padding in their losses and in the load of experts, because scheduled layers call them "
        "without the padding mask",
        severity=3,
        signs=Sign(
            "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables",
            has="layer.mlp.route(pre_mlp_layernorm_output)",
        ),
        affects=lambda run: (
            _reads_mask(run) and run.overlap_moe_expert_parallel_comm and not balances_by_quantiles(run)
        ),
        when=f"--overlap-moe-expert-parallel-comm with {_READS_MASK}",
        only_if=HAS_PADDING_MASK,
        evidence="reproduced",
        patch="pass-padding-mask-to-routers",
        second_reading="scheduled layers of 0.16.1 and main; its program on 0.18.2",
    ),
    Defect(
        id="overlap-padding-mask-quantile-balancing",
        effect="Quantile balancing counts padding in the load of experts, because scheduled layers call routers "
        "without the padding mask, which it would refuse",
        severity=2,
        signs=Sign(f"{_ROUTER}.routing", has="Quantile balancing routing does not support padding masks yet."),
        affects=lambda run: (
            may_mask_padding(run) and run.overlap_moe_expert_parallel_comm and balances_by_quantiles(run)
        ),
        when="--overlap-moe-expert-parallel-comm with --moe-router-load-balancing-type quantile_balancing",
        only_if=HAS_PADDING_MASK,
        evidence="read",
        second_reading="sources of main",
    ),
    Defect(
        id="ML-6114",
        effect="The first step with a padding mask ends in an error about shapes where routers count tokens",
        kind="crash",
        severity=3,
        signs=Sign(f"{_ROUTER}._apply_expert_bias", has="routing_map = routing_map & ~padding_mask", lacks="unsqueeze"),
        affects=lambda run: (  # mcore-bridge makes masks that fit (also below)
            may_mask_padding(run)
            and run.num_experts
            and run.moe_router_enable_expert_bias
            and not (run.is_of_ms_swift or run.overlap_moe_expert_parallel_comm)
        ),
        when="--moe-router-enable-expert-bias without --overlap-moe-expert-parallel-comm, but not in ms-swift",
        only_if=HAS_PADDING_MASK,
        more_links=("NVIDIA/Megatron-LM#6111",),
        state="fixed on main",
        evidence="reproduced",
        patch="pass-padding-mask-to-routers",
        second_reading="routers, and who calls them with a mask, of 0.16.1, 0.19.0 and main; its program on 0.18.2; "
        "the thread of #6111",
    ),
    Defect(
        id="ML-5563",
        effect="Pipeline stages after the first end in an error about shapes, because their padding mask is not split",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.models.gpt.gpt_model:GPTModel._preprocess",
            has=".transpose(0, 1).contiguous() else: decoder_input = None",  # only where the embedding is
        ),
        affects=lambda run: (
            _splits_mask(run)
            and not layers_of_hybrid(run)
            and pipeline_parallel(run) > 1
            and not (run.is_of_ms_swift or run.overlap_moe_expert_parallel_comm)
        ),
        when=f"{_READS_MASK} with --sequence-parallel and --pipeline-model-parallel-size > 1, without "
        "--overlap-moe-expert-parallel-comm, but not in ms-swift",
        only_if=HAS_PADDING_MASK,
        more_links=("NVIDIA/Megatron-LM#5088",),
        state="open",
        evidence="reproduced",
        patch="pass-padding-mask-to-routers",
        second_reading="models of 0.16.1 and main; its program on 0.18.2; the threads of #5563 and #5088",
    ),
    Defect(
        id="hybrid-padding-mask",
        effect="The first step of a hybrid model ends in an error about shapes, because its padding mask is not split",
        kind="crash",
        severity=3,
        signs=tuple(
            Sign(
                f"megatron.core.models.{model}.forward", has="padding_mask=padding_mask", lacks="padding_mask.transpose"
            )
            for model in ("hybrid.hybrid_model:HybridModel", "mamba.mamba_model:MambaModel")
        ),
        affects=lambda run: _splits_mask(run) and layers_of_hybrid(run) and not run.is_of_ms_swift,
        when=f"--hybrid-layer-pattern with --sequence-parallel and {_READS_MASK}, but not in ms-swift",
        only_if=HAS_PADDING_MASK,
        evidence="reproduced",
        patch="pass-padding-mask-to-routers",
        second_reading="models of 0.16.1 and main; cases of its predicate",
    ),
    Defect(
        id="mtp-heads-without-padding-mask",
        effect="The routers of MTP layers count padding in their losses and in the load of experts",
        severity=2,
        signs=Sign(
            "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.forward",
            has="self._get_embeddings(",
            lacks="padding_mask",
        ),
        affects=lambda run: _reads_mask(run) and heads_have_experts(run) and not layers_of_hybrid(run),
        when=f"--mtp-num-layers in a GPT whose MTP layers have experts, with {_READS_MASK}",
        only_if=HAS_PADDING_MASK,
        state="fixed in 0.18.0",
        evidence="reproduced",
        second_reading="MTP layers of 0.16.1, 0.17.1 and 0.18.2, and the call of the mask in GPTs (fixed) and hybrid "
        "models (not)",
    ),
    Defect(
        id="hybrid-mtp-without-padding-mask",
        effect="The routers of a hybrid model's MTP layers count padding in their losses and in the load of experts",
        severity=2,
        signs=tuple(
            Sign(
                f"megatron.core.models.{model}.forward",
                has="packed_seq_params=packed_seq_params, embedding=self.embedding",  # and no padding_mask between
            )
            for model in ("hybrid.hybrid_model:HybridModel", "mamba.mamba_model:MambaModel")
        ),
        affects=lambda run: _reads_mask(run) and heads_have_experts(run) and layers_of_hybrid(run),
        when=f"--mtp-num-layers in a hybrid model whose MTP layers have experts, with {_READS_MASK}",
        only_if=HAS_PADDING_MASK,
        evidence="read",
        second_reading="the calls of MTP layers by hybrid models of 0.16.1, 0.17.1, 0.18.2 and main; cases of its "
        "predicate",
    ),
)
