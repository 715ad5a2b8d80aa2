"""Declares watch-invariants."""

from ..declarations.settings import Setting, optimizer_setting
from ..declarations.shared_edits import SHOW_METRICS
from ..engine import Patch, Wrap

PATCH = Patch(
    id="watch-invariants",
    summary="Check in a live run that copies and batches agree, weights are main weights, and all is finite and trains",
    problem="Copies of a weight on several ranks may drift apart, an update or a gather may be lost, and the log does "
    "not tell. Megatron's own check (`--check-weight-hash-across-dp-replicas-interval`) compares weights of "
    "data-parallel replicas alone, and not those of tensor-parallel ranks, of tied embeddings and of the optimizer.",
    adds=(
        "`OptimizerConfig.watch_invariants`: in the first update and then in every Nth, before it: weights, main "
        "weights, moments, gradients and buffers of which several ranks have copies have the same bits; a weight is "
        "its main weight in the model's dtype; weights, moments, gradients and losses are finite; ranks of a replica "
        "have the same batches, and replicas other ones. Around it: the gradient norm is that of all gradients; what "
        "trains moves, and what is frozen stays.",
        "`OptimizerConfig.watch_action`: warn, once for each kind, or raise on all ranks. Copies that differ by "
        "rounding only warn.",
        "The training log, TensorBoard and W&B get the number of findings so far. A finding names known defects that "
        "affect the run, have this effect, and are not removed.",
    ),
    undetected="It is a check, and no repair.",
    numerics="Nothing changes without a flag, nor with it.",
    edits=(
        *optimizer_setting(
            Setting(
                "watch_invariants",
                int,
                0,
                "Before the first update and then before every Nth, compare the copies that ranks have of weights, "
                "buffers and optimizer state (0: never).",
                unit="steps; 0 watches none",
            )
        ),
        *optimizer_setting(
            Setting(
                "watch_action",
                str,
                "warn",
                "What a difference that --watch-invariants finds does: warn (once of each kind) or raise.",
                choices=("warn", "raise"),
                check="megatron_overrides.watch.checks:check_action",
                example="warn",  # raise needs a watch
            )
        ),
        *(
            Wrap(maker, "megatron_overrides.watch.wrappers:watch_optimizer", check_source=False)
            for maker in (
                "megatron.core.optimizer:get_megatron_optimizer",
                "megatron.core.optimizer.muon:get_megatron_muon_optimizer",  # of 0.16 and 0.17
            )
        ),
        *SHOW_METRICS,
    ),
)
