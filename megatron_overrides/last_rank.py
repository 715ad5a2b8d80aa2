"""Warnings of the last rank, which writes Megatron's log: with pipeline stages the first one has no heads."""

from __future__ import annotations

import logging

import torch
from megatron.core.utils import log_single_rank


def warn_on_last_rank(logger: logging.Logger, text: str) -> None:
    """Log `text` as a warning on the last rank alone; without torch.distributed, on this one."""
    last = torch.distributed.get_world_size() - 1 if torch.distributed.is_initialized() else 0
    log_single_rank(logger, logging.WARNING, text, rank=last)
