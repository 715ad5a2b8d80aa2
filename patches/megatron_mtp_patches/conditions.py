"""What several defects ask of the settings of a run."""

from __future__ import annotations

TYPE_CHECKING = False  # as in engine/engine.py: typing itself is not imported
if TYPE_CHECKING:
    from typing import Any


def is_layer_wise(run: Any) -> bool:
    """Whether ranks share out whole parameters: dist_muon, which 0.19 reads as muon with this setting."""
    return bool(run.use_layer_wise_distributed_optimizer) or str(run.optimizer).startswith("dist_")


def recomputes_heads(run: Any) -> bool:
    """Whether the MTP heads run again in backward; `--recompute-method block` leaves them out."""
    return bool(run.mtp_num_layers and run.recompute_granularity == "full" and run.recompute_method != "block")


def resumes_optimizer(run: Any) -> bool:
    """Whether the state of the optimizer is saved for later or loaded."""
    loads = run.load and not (run.no_load_optim or run.finetune)
    return bool(loads or (run.save and not run.no_save_optim))
