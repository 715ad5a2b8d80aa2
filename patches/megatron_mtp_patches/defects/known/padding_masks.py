"""Padding masks of routers: who gets none, and who cannot take one."""

from __future__ import annotations

from ..conditions import balances_by_quantiles, has_any_aux_loss, has_z_loss, tensor_parallel
from ..declare import Defect, Sign

_ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
_HAS_MASK = "the model gets a padding mask, which Megatron's trainer does not give it"

DEFECTS = (
    Defect(
        id="overlap-padding-mask",
        effect=(
            "Routers count padding in their losses and in the load of experts, because scheduled layers call them "
            "without the padding mask"
        ),
        kind="wrong numbers",
        severity=3,
        signs=(
            Sign(
                "megatron.core.models.gpt.fine_grained_callables:build_transformer_layer_callables",
                has="layer.mlp.route(pre_mlp_layernorm_output)",
            ),
        ),
        affects=lambda run: (
            run.overlap_moe_expert_parallel_comm
            and (has_any_aux_loss(run) or has_z_loss(run) or run.moe_router_enable_expert_bias)
            and not balances_by_quantiles(run)
        ),
        when=(
            "--overlap-moe-expert-parallel-comm with --moe-aux-loss-coeff, --moe-z-loss-coeff or "
            "--moe-router-enable-expert-bias"
        ),
        only_if=_HAS_MASK,
        links=(),
        state="unreported",
        evidence="reproduced",
        patch="pass-padding-mask-to-routers",
    ),
    Defect(
        id="overlap-padding-mask-quantile-balancing",
        effect=(
            "Quantile balancing counts padding in the load of experts, because scheduled layers call routers without "
            "the padding mask, which it would refuse"
        ),
        kind="wrong numbers",
        severity=2,
        signs=(Sign(f"{_ROUTER}.routing", has="Quantile balancing routing does not support padding masks yet."),),
        affects=lambda run: run.overlap_moe_expert_parallel_comm and balances_by_quantiles(run),
        when="--overlap-moe-expert-parallel-comm with --moe-router-load-balancing-type quantile_balancing",
        only_if=_HAS_MASK,
        links=(),
        state="unreported",
        evidence="read",
    ),
    Defect(
        id="ML-6114",
        effect="The first step with a padding mask ends in an error about shapes where routers count tokens",
        kind="crash",
        severity=2,
        signs=(
            Sign(
                f"{_ROUTER}._apply_expert_bias",
                has="routing_map = routing_map & ~padding_mask",
                lacks="unsqueeze",
            ),
        ),
        affects=lambda run: run.num_experts and run.moe_router_enable_expert_bias,
        when="--moe-router-enable-expert-bias",
        only_if=_HAS_MASK,
        links=("NVIDIA/Megatron-LM#6114",),
        state="fixed on main",
        evidence="reproduced",
        patch="pass-padding-mask-to-routers",
    ),
    Defect(
        id="ML-5563",
        effect="Pipeline stages after the first end in an error about shapes, because their padding mask is not split",
        kind="crash",
        severity=2,
        signs=(
            Sign(
                "megatron.core.models.gpt.gpt_model:GPTModel._preprocess",
                has=".transpose(0, 1).contiguous() else: decoder_input = None",  # only where the embedding is
            ),
        ),
        affects=lambda run: (
            run.num_experts
            and run.sequence_parallel
            and tensor_parallel(run) > 1
            and (run.pipeline_model_parallel_size or 1) > 1
        ),
        when="--num-experts with --sequence-parallel and --pipeline-model-parallel-size > 1",
        only_if=_HAS_MASK,
        links=("NVIDIA/Megatron-LM#5563",),
        state="open",
        evidence="reproduced",
        patch="pass-padding-mask-to-routers",
    ),
)
