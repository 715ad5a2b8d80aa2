"""The wrapper that gives an optimizer its watch."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.watch.watch import Watch

logger = logging.getLogger(__name__)


def watch_optimizer(call: Call) -> Any:
    """Wraps what makes the optimizer from (config, model_chunks, ...): its step goes through a watch, if one is asked.

    What it returns may be a chain or a single optimizer, so the step of the object is replaced, not of a class.
    """
    optimizer = call.proceed()
    config = call.get("config")  # Muon's maker of 0.18 names no parameters: it calls the other one
    if getattr(config, "watch_invariants", 0):
        chunks = as_list(call["model_chunks"])
        if any(type(chunk).__name__ == "TorchFullyShardedDataParallel" for chunk in chunks):
            log_single_rank(logger, logging.WARNING, "watch: checks nothing under torch's FSDP2")
        else:
            watch = Watch(config, chunks, optimizer)
            optimizer.step = partial(watch.step, optimizer.step)
    return optimizer
