"""Where the settings of the patches stand in the configuration of each trainer: the only list of these places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..catalog import SETTINGS, SETTINGS_OF_OPTIMIZER
from .settings import Setting

# {a section: the names of the settings that are read there}; the section '' is the whole configuration.
Places = Mapping[str, frozenset[str]]


def _names(settings: Iterable[Setting]) -> frozenset[str]:
    return frozenset(setting.name for setting in settings)


_OF_OPTIMIZER = _names(SETTINGS_OF_OPTIMIZER)
_OF_MODEL = _names(SETTINGS.values()) - _OF_OPTIMIZER

MEGATRON: Places = {"TransformerConfig": _OF_MODEL, "OptimizerConfig": _OF_OPTIMIZER}
# Configurations of models that have builders hold those of Megatron in a section of their own.
MEGATRON_BRIDGE: Places = {"model": _OF_MODEL, "optimizer": _OF_OPTIMIZER, "transformer": _OF_MODEL}
VERL: Places = {"override_transformer_config": _OF_MODEL, "override_optimizer_config": _OF_OPTIMIZER}
MS_SWIFT: Places = {"": _OF_OPTIMIZER | _names(setting for setting in SETTINGS.values() if setting.in_ms_swift)}


def sections_of(content: Mapping[Any, Any], name: str = "") -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield a configuration as ('', itself) and then each mapping in it, at any depth, with the last of its names."""
    yield name, content
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from sections_of(value, str(key))
