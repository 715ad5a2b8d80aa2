"""The wrappers that give an optimizer its watch, and have it look at each step."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.watch.watch import Watch

_watches: WeakKeyDictionary[Any, Watch] = WeakKeyDictionary()


def watch_optimizer(call: Call) -> Any:
    """Wraps get_megatron_optimizer(config, model_chunks, ...): watches what that returns, where the setting says so."""
    optimizer = call.proceed()
    if getattr(call.get("config"), "watch_invariants", 0):  # 0.18 has a maker of Muon that hands all on to the other
        _watches[optimizer] = Watch(as_list(call["model_chunks"]), optimizer)
    return optimizer


def watch_step(call: Call) -> Any:
    """Wraps step() of Megatron's optimizers: (success, gradient norm, zeros). Those inside a chain have no watch."""
    watch = _watches.get(call.instance)
    return call.proceed() if watch is None else watch.step(call.proceed)
