"""The wrappers that give an optimizer its watch, and have it look at each step."""

from __future__ import annotations

import logging
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.watch.watch import Watch

logger = logging.getLogger(__name__)


def watch_optimizer(call: Call) -> Any:
    """Wraps get_megatron_optimizer(config, model_chunks, ...): watches what that returns, where the setting says so."""
    optimizer = call.proceed()
    if getattr(call["config"], "watch_invariants", 0):
        chunks = as_list(call["model_chunks"])
        if any("FullyShardedDataParallel" in type(chunk).__name__ for chunk in chunks):
            text = "watch: checks nothing under Megatron-FSDP or torch's FSDP2, whose weights are shards"
            log_single_rank(logger, logging.WARNING, text)
        else:
            optimizer._mtp_patches_watch = Watch(call["config"], chunks, optimizer)
    return optimizer


def watch_step(call: Call) -> Any:
    """Wraps ChainedOptimizer.step(): (success, gradient norm, zeros). A chain inside a chain has no watch."""
    watch: Watch | None = vars(call.instance).get("_mtp_patches_watch")
    return call.proceed() if watch is None else watch.step(call.proceed)
