"""Declares average-aux-loss-over-moe-layers."""

from __future__ import annotations

from ..engine import Defect, Patch, Probe, PullRequest, Wrap
from ..shared_edits import MARK_TRAINING_LOG, MOE_LOGGING, MTP, REPORTS_OF_AUX_LOSSES

TYPE_CHECKING = False  # as in engine/engine.py: typing itself is not imported
if TYPE_CHECKING:
    from typing import Any


def _experts_of_hybrid_head(run: Any) -> str:
    """The layers of a hybrid model's head up to its last one with experts; '' where it has none."""
    _, _, heads = (run.hybrid_layer_pattern or "").partition("/")
    before, experts, _ = heads.partition("/")[0].rpartition("E")
    return before + experts


def _ends_dense(run: Any) -> bool:
    """Whether the last layer of the main model, which heads are like, has no experts."""
    frequency = run.moe_layer_freq
    if isinstance(frequency, str):  # "2" or "([0]*1+[1]*23)": a configuration that Megatron's parser has not read
        last = frequency.rpartition("[")[2].partition("]")[0].split(",")[-1:]
        frequency = last if "[" in frequency else int(frequency)
    if isinstance(frequency, (list, tuple)):
        return not int(frequency[-1])
    return ((run.num_layers or 1) - 1) % (frequency or 1) != 0


def _is_repeated(run: Any) -> bool:
    return bool(run.mtp_use_repeated_layer and (run.mtp_num_layers or 0) > 1)


def _is_divided_wrongly(run: Any) -> bool:
    """Whether the number of MoE layers that the trainer counts is not that of the model."""
    if not (run.num_experts and run.mtp_num_layers):
        return False
    return bool(run.hybrid_layer_pattern) or _is_repeated(run) or _ends_dense(run)


PATCH = Patch(
    id="average-aux-loss-over-moe-layers",
    summary="Log MoE auxiliary losses as their mean over MoE layers, and count that of a repeated hybrid head once",
    upstream=(PullRequest(6748, native_since="main"),),
    problem=(
        "The trainer logs the sum of the auxiliary losses of all routers, divided by the number of MoE layers. It "
        "takes each MTP head for one, even if heads have no experts, and each pass of a repeated head, whose losses "
        "already are divided by the number of its passes. It counts the heads of a hybrid model twice. The logged "
        "loss is then too small. The routers of a hybrid model's heads do not know that they belong to a head: they "
        "put their losses into the slots of the main model, and a repeated head trains with its auxiliary loss as "
        "many times as it has passes."
    ),
    adds=(
        "`track_moe_metrics` and `MoEMetricsTracker.report` take `num_moe_layers`, the number that they divide by.",
        "Routers in the heads of a hybrid model have `is_mtp_layer`, and put their losses into the slot of their head.",
        "A pipeline stage of a hybrid model without MoE layers reduces as many slots as the others do.",
    ),
    repairs=(
        "On main, a router in the head of a hybrid model takes its place in the pattern of the head for the depth. If "
        "there are fewer depths than that, as with `M*E/*E`, training ends in an IndexError. With this patch the "
        "number of the router is the depth.",
    ),
    numerics=(
        "The logged auxiliary losses, where they were divided by a wrong number. The gradient changes only for a "
        "repeated head of a hybrid model with experts (0.17 to 0.19): its auxiliary loss counts once, as in a GPT. "
        "The gradient of the z-loss is not touched."
    ),
    notes=("A trainer other than Megatron's own passes `num_moe_layers` to get the right mean.",),
    defects=(
        Defect(
            "The logged MoE auxiliary loss is too small, because it is divided by more than the number of MoE layers",
            releases=("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
            affects=_is_divided_wrongly,
        ),
        Defect(
            "A repeated head of a hybrid model trains with its auxiliary loss as many times as it has passes",
            releases=("0.17.1", "0.18.2", "0.19.2"),
            affects=lambda run: _experts_of_hybrid_head(run) and _is_repeated(run),
        ),
        Defect(
            "Training ends in an IndexError when a router of a hybrid head records its auxiliary loss",
            releases=("main",),
            affects=lambda run: len(_experts_of_hybrid_head(run)) > (run.mtp_num_layers or 0),
        ),
    ),
    probe=Probe(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report", contains="num_moe_layers is None"
    ),
    edits=(
        MARK_TRAINING_LOG,
        *(Wrap(report, f"{MOE_LOGGING}:average_over_moe_layers") for report in REPORTS_OF_AUX_LOSSES),
        Wrap(f"{MTP}:MultiTokenPredictionLayer.__init__", "megatron_overrides.moe.wrappers:mark_routers_of_head"),
    ),
)
