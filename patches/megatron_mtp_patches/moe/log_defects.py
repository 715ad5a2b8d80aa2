"""Experts beside MTP heads: their auxiliary losses, in the log and in training, and replayed routes."""

from __future__ import annotations

from typing import Any

from ..defects.conditions import (
    experts_of_hybrid_head,
    has_any_aux_loss,
    has_z_loss,
    heads_have_experts,
    pipeline_parallel,
    repeats_a_head,
)
from ..defects.declare import Defect, Gap, Sign

_REPORT = "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report"
_COUNTS = "num_moe_layers is None"
_TRACK = "megatron.core.transformer.moe.moe_utils:track_moe_metrics"
_DIVIDES_BY_LAYERS = (Sign(_REPORT, lacks=_COUNTS), Sign(_TRACK, has="num_moe_layers += mtp_num_layers"))


def _logs_losses(run: Any) -> bool:
    """True if routers have losses, which Megatron logs."""
    return has_any_aux_loss(run) or has_z_loss(run)


def _is_divided_wrongly(run: Any) -> bool:
    """True if the number of MoE layers that the trainer counts is not that of the model."""
    if not (run.num_experts and run.mtp_num_layers and _logs_losses(run)):
        return False
    return bool(run.hybrid_layer_pattern) or repeats_a_head(run) or not heads_have_experts(run)


DEFECTS = (
    Defect(
        "ML-6748",
        "The logged MoE losses are too small, because they are divided by more than the number of MoE layers",
        kind="wrong log",
        severity=2,
        signs=_DIVIDES_BY_LAYERS,
        affects=_is_divided_wrongly,
        when="--num-experts with --mtp-num-layers and --moe-aux-loss-coeff or --moe-z-loss-coeff, where MTP layers "
        "have no experts or are one repeated layer, or in a hybrid model",
        state="fixed on main",
        evidence="reproduced",
        patch="average-aux-loss-over-moe-layers",
        unless=Gap(
            lambda run: not (run.is_of_megatron_trainer or run.is_of_megatron_bridge or run.is_of_ms_swift),
            when="other trainers than Megatron-LM's, Megatron-Bridge's and ms-swift's, unless they pass num_moe_layers",
            because="only in the trainers of Megatron-LM, Megatron-Bridge and ms-swift the number of MoE layers is "
            "known, unless another one passes num_moe_layers to track_moe_metrics",
        ),
        second_reading="the trainer's count of MoE layers and what it divides in 0.16.1, 0.18.2, 0.19.0 and main; its "
        "program; doctor under its flags and just outside",
    ),
    Defect(
        "ML-6748b",
        "The auxiliary loss of the repeated MTP layer of a hybrid model has a gradient that is --mtp-num-layers times "
        "too large, because the layer trains with the whole of it once for each pass",
        severity=3,
        signs=_DIVIDES_BY_LAYERS,
        fixed_by=Sign("megatron.core.transformer.transformer_config:TransformerConfig", lacks="mtp_use_repeated_layer"),
        affects=lambda run: experts_of_hybrid_head(run) and repeats_a_head(run) and has_any_aux_loss(run),
        when="--hybrid-layer-pattern with experts in an MTP layer, --mtp-use-repeated-layer, --mtp-num-layers > 1 and "
        "--moe-aux-loss-coeff",
        state="fixed on main",
        evidence="reproduced",
        patch="average-aux-loss-over-moe-layers",
        second_reading="routers and hybrid layers of 0.17.1, 0.18.2, 0.19.0 and main; its program on 0.18.2; cases of "
        "its predicate",
    ),
    Defect(
        "ML-6748c",
        "Training ends in an IndexError when a router in an MTP layer of a hybrid model records its loss",
        kind="crash",
        severity=3,
        signs=Sign(_REPORT, has=_COUNTS),
        affects=lambda run: len(experts_of_hybrid_head(run)) > (run.mtp_num_layers or 0) and _logs_losses(run),
        when="--hybrid-layer-pattern whose MTP part has its last E at a place beyond --mtp-num-layers, as M*E/*E, with "
        "--moe-aux-loss-coeff or --moe-z-loss-coeff",
        introduced_by=("NVIDIA/Megatron-LM#6748",),
        more_links=("NVIDIA/Megatron-LM#7319",),
        state="open",
        evidence="reproduced",
        patch="average-aux-loss-over-moe-layers",
        second_reading="routers of 0.19.0 and main, and what divides the losses there; the thread of #7319 (closed, "
        "not merged); cases of its predicate",
    ),
    Defect(
        id="ML-3401",
        effect="The first log of the MoE losses hangs or adds wrong numbers, because pipeline stages without MoE "
        "layers reduce tensors of another length",
        kind="hang",
        severity=3,
        signs=Sign(_TRACK, has='tracker[key]["values"] = torch.zeros(num_layers, device="cuda")'),
        affects=lambda run: (
            run.mtp_num_layers
            and pipeline_parallel(run) > 1
            and (
                run.moe_layer_freq not in (None, 1)
                or run.pipeline_model_parallel_layout
                or run.account_for_embedding_in_pipeline_split
            )
            and _logs_losses(run)
        ),
        when="--mtp-num-layers with --moe-layer-freq, --pipeline-model-parallel-layout or "
        "--account-for-embedding-in-pipeline-split, --pipeline-model-parallel-size > 1 and --moe-aux-loss-coeff or "
        "--moe-z-loss-coeff",
        only_if="a pipeline stage has no MoE layer",
        instead="split the layers so that each pipeline stage has an MoE layer (--decoder-first-pipeline-num-layers), "
        "or over fewer stages",
        state="fixed in 0.17.0",
        evidence="reproduced",
        second_reading="what the losses are summed in on stages with and without experts in 0.16.1 and 0.17.1; the "
        "trainer's call of 0.16.1; its program with four layers, of which both stages or one have experts; how 0.16.1 "
        "splits layers over stages",
    ),
    Defect(
        "ML-7404",
        "Routes of the main model cannot be replayed, because the list of routers has those of MTP layers as well; "
        "recorded routes have None for MTP layers that did not run",
        kind="crash",
        severity=3,
        signs=Sign(
            "megatron.core.transformer.moe.router_replay:RouterReplay.get_recorded_data",
            has="for router in RouterReplay.global_router_replay_instances",
        ),
        affects=lambda run: run.moe_enable_routing_replay and heads_have_experts(run),
        when="--moe-enable-routing-replay with --num-experts and --mtp-num-layers, where MTP layers have experts",
        state="open",
        evidence="reproduced",
        patch="leave-heads-out-of-router-replay",
        second_reading="sources of 0.16.1 and main; its program on 0.18.2; doctor under its flags and just outside; "
        "the thread of #7404",
    ),
)
