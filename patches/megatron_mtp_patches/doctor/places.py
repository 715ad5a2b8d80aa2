"""Where the settings of the patches stand in the configuration of each trainer: the only list of these places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..catalog import SETTINGS, SETTINGS_OF_OPTIMIZER
from ..declarations.settings import Setting


@dataclass(frozen=True)
class Places:
    """The sections of a trainer's configuration from which settings of the patches are read.

    Attributes:
        sections: {a section: the names of the settings}; the section '' is the whole configuration.
        carriers: {a setting: the ids of the patches without which this trainer does not act on it}, beside its own.
        why_others_are_idle: the trainer that does not act on other settings, and why; '' if there are none.
    """

    sections: Mapping[str, frozenset[str]]
    carriers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    why_others_are_idle: str = ""

    def home_of(self, name: str) -> str:
        """The section from which the setting is read; '' for the whole configuration, or if there is none."""
        return next((section for section, names in self.sections.items() if name in names), "")


def _names(settings: Iterable[Setting]) -> frozenset[str]:
    return frozenset(setting.name for setting in settings)


_OPTIMIZER_SETTINGS = _names(SETTINGS_OF_OPTIMIZER)
_MODEL_SETTINGS = _names(SETTINGS.values()) - _OPTIMIZER_SETTINGS
_SWIFT_MODEL_SETTINGS = _names(setting for setting in SETTINGS.values() if setting.in_ms_swift) - _OPTIMIZER_SETTINGS
_SCHEDULE = "mtp_loss_scaling_schedule"

MEGATRON = Places({"TransformerConfig": _MODEL_SETTINGS, "OptimizerConfig": _OPTIMIZER_SETTINGS})
MEGATRON_BRIDGE = Places(
    # Configurations of models that have builders hold those of Megatron in a section `transformer`.
    {"model": _MODEL_SETTINGS, "optimizer": _OPTIMIZER_SETTINGS, "transformer": _MODEL_SETTINGS},
    {_SCHEDULE: ("schedule-mtp-loss-weight-in-megatron-bridge",)},
)
VERL = Places(
    {"override_transformer_config": _MODEL_SETTINGS, "override_optimizer_config": _OPTIMIZER_SETTINGS},
    {_SCHEDULE: ("schedule-mtp-loss-weight-in-verl",)},
)
MS_SWIFT = Places(
    {"": _OPTIMIZER_SETTINGS | _SWIFT_MODEL_SETTINGS},
    dict.fromkeys(_OPTIMIZER_SETTINGS, ("add-settings-to-ms-swift",))
    | dict.fromkeys(_SWIFT_MODEL_SETTINGS, ("add-settings-to-ms-swift", "train-heads-in-mcore-bridge")),
    "ms-swift, whose trainer and models do not read it",
)


def sections_of(content: Mapping[Any, Any], name: str = "") -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield a configuration as ('', itself) and then each mapping in it, at any depth, with the last of its names."""
    yield name, content
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from sections_of(value, str(key))
