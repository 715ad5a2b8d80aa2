"""Declares watch-invariants."""

from ..declarations.settings import Setting, optimizer_setting
from ..declarations.shared_edits import OPTIMIZER
from ..engine import Patch, Wrap

_MAKERS = ("megatron.core.optimizer:get_megatron_optimizer", "megatron.core.optimizer.muon:get_megatron_muon_optimizer")
_OPTIMIZERS = ("ChainedOptimizer", "MixedPrecisionOptimizer", "FP32Optimizer")  # all others step by these

PATCH = Patch(
    id="watch-invariants",
    summary="Compare copies of weights, buffers and optimizer state over all ranks of a live run",
    problem="Ranks have copies of weights, buffers and optimizer state that have to be equal. Megatron's own check "
    "(`--check-weight-hash-across-dp-replicas-interval`) compares weights of data-parallel replicas alone, so copies "
    "of tensor-parallel ranks, of tied embeddings and of the optimizer may drift apart for weeks.",
    adds=(
        "`OptimizerConfig.watch_invariants`: before the first update and then before every Nth, all ranks compare what "
        "several of them have: weights, buffers that a checkpoint has, main weights and moments.",
        "`OptimizerConfig.watch_action`: warn, once, or raise on all ranks.",
    ),
    undetected="It is a check, and no repair.",
    numerics="None.",
    notes=(
        "A step that is checked reads each such tensor once, and has one all-reduce of 16 bytes for each shared tensor "
        "of the whole model. Other steps pay for a look-up.",
        "Not compared: models under Megatron-FSDP, which have no sharded_state_dict.",
    ),
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
            )
        ),
        *(Wrap(maker, "megatron_overrides.watch.wrappers:watch_optimizer", check_source=False) for maker in _MAKERS),
        *(
            Wrap(f"{OPTIMIZER}:{optimizer}.step", "megatron_overrides.watch.wrappers:watch_step", check_source=False)
            for optimizer in _OPTIMIZERS
        ),
    ),
)
