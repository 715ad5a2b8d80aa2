"""What several defects ask of the settings of a run."""

from __future__ import annotations

TYPE_CHECKING = False  # as in engine/engine.py: typing itself is not imported
if TYPE_CHECKING:
    from typing import Any


def is_layer_wise(run: Any) -> bool:
    """Whether ranks share out whole parameters: dist_muon, which 0.19 reads as muon with this setting."""
    return bool(run.use_layer_wise_distributed_optimizer) or str(run.optimizer).startswith("dist_")


def has_heads_on_last_stage(run: Any) -> bool:
    """Whether the MTP heads are on the last pipeline stage, as they are unless a layout puts them on another one."""
    layout = run.pipeline_model_parallel_layout
    layout = getattr(layout, "input_data", layout)  # Megatron's object keeps what it was made of
    if not run.mtp_num_layers or not layout:
        return bool(run.mtp_num_layers)
    if isinstance(layout, str):  # "Et*2|(t|)*2tm|L"
        return "m" in layout.rpartition("|")[2]
    return any(str(getattr(layer, "name", layer)).strip().lower() == "mtp" for layer in layout[-1])


def recomputes_heads(run: Any) -> bool:
    """Whether the MTP heads run again in backward; `--recompute-method block` leaves them out."""
    return bool(run.mtp_num_layers and run.recompute_granularity == "full" and run.recompute_method != "block")


def resumes_optimizer(run: Any) -> bool:
    """Whether the state of the optimizer is saved for later or loaded."""
    loads = run.load and not (run.no_load_optim or run.finetune)
    return bool(loads or (run.save and not run.no_save_optim))
