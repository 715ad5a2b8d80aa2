"""Check settings by their declarations (`Setting` in the package's settings.py), and name them in errors."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any


def spell(name: str) -> str:
    """Return `--mtp-clip-grad (OptimizerConfig.mtp_clip_grad)`: frameworks with configurations have no flags.

    In a process with ms-swift it is `--mtp_clip_grad`, as its commands and files have it.
    """
    if "swift.megatron" in sys.modules:
        return f"--{name}"
    flag = f"--{name.replace('_', '-')}"
    for configuration in configurations():
        if name in vars(configuration)["__dataclass_fields__"]:
            return f"{flag} ({configuration.__name__}.{name})"
    return flag


def configurations() -> tuple[type, type]:
    """The classes of the configurations of a run."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig, OptimizerConfig


def declared_settings(*classes: type) -> Iterator[Any]:
    """Yield the declarations of the settings that the patches have added to configuration classes."""
    for configuration in classes:
        for field in getattr(configuration, "__dataclass_fields__", {}).values():
            if "setting" in field.metadata:
                yield field.metadata["setting"]


def all_settings() -> Iterator[Any]:
    """Yield the declarations of both configurations of a run."""
    return declared_settings(*configurations())


def check(settings: Any, declarations: Iterable[Any]) -> None:
    """Raise ValueError if `settings` ask for what cannot work.

    Args:
        settings: a TransformerConfig, an OptimizerConfig, both in one, or Megatron's arguments. It may lack any.
        declarations: what is checked.
    """
    for declared in declarations:
        _check_value(declared, getattr(settings, declared.name, declared.default))
        if declared.check:
            module, _, name = declared.check.partition(":")
            getattr(importlib.import_module(module), name)(settings)


def refuse_others(settings: Any, name: str, reason: str, *others: tuple[str, object, str]) -> None:
    """Raise ValueError if another setting is on that cannot be combined with the one called `name`, which is on.

    Args:
        reason: why, as the end of "--our-name ...".
        others: the name of each setting, its value when it is off (None is off as well), and what it does that cannot
            work, as the end of "..., but --its-name ...".
    """
    for other, off, effect in others:
        if getattr(settings, other, None) not in (off, None):
            raise ValueError(f"{spell(name)} {reason}, but {spell(other)} {effect}: leave one of the two out")


def _check_value(declared: Any, value: Any) -> None:
    """Refuse a value of another kind: a string for a switch, even "false", would turn it on."""
    if declared.type is bool and value is not None and not isinstance(value, bool):
        raise ValueError(f"{spell(declared.name)} {value!r}: give True or False")
    if declared.unit and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"{spell(declared.name)} {value!r}: give a number of {declared.unit}")
    if declared.choices and value not in declared.choices:
        raise ValueError(f"{spell(declared.name)} must be one of {', '.join(declared.choices)}, not {value!r}")


def changed_settings(*configs: Any) -> dict[str, Any]:
    """The settings of the patches in these configurations, by name, that differ from their defaults."""
    return {
        declared.name: value
        for config in configs
        for declared in declared_settings(type(config))
        if (value := getattr(config, declared.name, declared.default)) != declared.default
    }


def captures_whole_iteration(settings: Any) -> bool:
    """True if a CUDA graph repeats a whole training iteration, the losses included.

    Args:
        settings: a TransformerConfig or Megatron's args. The graph is a `cuda_graph_scope` up to 0.17, and a
            `cuda_graph_impl` from 0.18 on; "full_iteration_inference" is another one.
    """
    graphs = (str(getattr(settings, f"cuda_graph_{kind}", "")) for kind in ("impl", "scope", "modules"))
    return any(re.search(r"full_iteration\b", graph) for graph in graphs)
