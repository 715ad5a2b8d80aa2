"""Errors of one rank that all ranks of a model raise or none, and warnings by the rank that writes the log."""

from __future__ import annotations

import logging
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import log_single_rank


def is_on_any_rank(is_here: bool, process_groups: Any) -> bool:
    """Return whether `is_here` is True on any rank of a model. A collective of all ranks that have a part of the model.

    Args:
        process_groups: the ProcessGroupCollection of the model, or None for Megatron's global groups; without those
            either, only this rank is asked.
    """
    groups: list[Any] = [getattr(process_groups, name, None) for name in ("tp", "pp", "dp_cp")]
    if None in groups:
        groups = _global_groups()
    groups = [group for group in groups if group.size() > 1]
    if not groups:
        return is_here
    # A model may be converted over gloo, on a machine without a GPU.
    flag = torch.tensor(is_here, dtype=torch.int, device="cuda" if torch.cuda.is_available() else "cpu")
    for group in groups:
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group)
    return bool(flag.item())


def _global_groups() -> list[Any]:
    if not parallel_state.model_parallel_is_initialized():
        return []
    return [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    ]


def warn_on_last_rank(logger: logging.Logger, text: str) -> None:
    """Log `text` as a warning on the last rank alone; without torch.distributed, on this one.

    It writes Megatron's log: with pipeline stages the first rank has no heads.
    """
    last = torch.distributed.get_world_size() - 1 if torch.distributed.is_initialized() else 0
    log_single_rank(logger, logging.WARNING, text, rank=last)
