"""The wrappers that give an optimizer its watch, and have it look at each step."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from megatron_overrides.call import Call
from megatron_overrides.model_chunks import as_list
from megatron_overrides.watch.watch import Watch

_watches: WeakKeyDictionary[Any, Watch] = WeakKeyDictionary()


def watch_optimizer(call: Call) -> Any:
    """Wraps get_megatron_optimizer(config, model_chunks, ...): the optimizer that it returns is watched, if this is on."""
    optimizer = call.proceed()
    if getattr(call.get("config"), "watch_invariants", 0):  # 0.18 has a maker of Muon that hands all on to the other
        _watches[optimizer] = Watch(as_list(call["model_chunks"]), optimizer)
    return optimizer


def check_before_update(call: Call) -> Any:
    """Wraps step() of Megatron's optimizers. Those inside a chain have no watch."""
    if (watch := _watches.get(call.instance)) is not None:
        watch.check()
    return call.proceed()
