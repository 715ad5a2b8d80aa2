"""The wrapper that gives an optimizer its watch."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from functools import partial
from typing import Any

from megatron.core.utils import log_single_rank

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.scoped import scoped
from megatron_overrides.watch.watch import Watch

logger = logging.getLogger(__name__)


# True while an optimizer with a watch is made: Muon's maker of 0.16 and 0.17 has the other one make a part of it.
_is_making: ContextVar[bool] = ContextVar("is_making", default=False)


def watch_optimizer(call: Call) -> Any:
    """Wraps what makes the optimizer from (config, model_chunks, ...): its step goes through a watch, if one is asked.

    What it returns may be a chain or a single optimizer, so the step of the object is replaced, not of a class.
    """
    config = call.get("config")  # Muon's maker of 0.18 names no parameters: it calls the other one
    if not getattr(config, "watch_invariants", 0) or _is_making.get():
        return call.proceed()
    with scoped(_is_making, True):
        optimizer = call.proceed()
    chunks = as_list(call["model_chunks"])
    if any(type(chunk).__name__ == "TorchFullyShardedDataParallel" for chunk in chunks):
        log_single_rank(logger, logging.WARNING, "watch: checks nothing under torch's FSDP2")
    else:
        watch = Watch(config, chunks, optimizer)
        optimizer.step = partial(watch.step, optimizer.step)
    return optimizer
