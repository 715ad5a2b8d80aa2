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
    """

    sections: Mapping[str, frozenset[str]]
    carriers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def home_of(self, name: str) -> str:
        """The section from which the setting is read; '' for the whole configuration, or if there is none."""
        return next((section for section, names in self.sections.items() if name in names), "")


def _names(settings: Iterable[Setting]) -> frozenset[str]:
    return frozenset(setting.name for setting in settings)


_OF_OPTIMIZER = _names(SETTINGS_OF_OPTIMIZER)
_OF_MODEL = _names(SETTINGS.values()) - _OF_OPTIMIZER
_OF_MODEL_IN_MS_SWIFT = _names(setting for setting in SETTINGS.values() if setting.in_ms_swift) - _OF_OPTIMIZER
_SCHEDULE = "mtp_loss_scaling_schedule"

MEGATRON = Places({"TransformerConfig": _OF_MODEL, "OptimizerConfig": _OF_OPTIMIZER})
MEGATRON_BRIDGE = Places(
    # Configurations of models that have builders hold those of Megatron in a section `transformer`.
    {"model": _OF_MODEL, "optimizer": _OF_OPTIMIZER, "transformer": _OF_MODEL},
    {_SCHEDULE: ("schedule-mtp-loss-weight-in-megatron-bridge",)},
)
VERL = Places(
    {"override_transformer_config": _OF_MODEL, "override_optimizer_config": _OF_OPTIMIZER},
    {_SCHEDULE: ("schedule-mtp-loss-weight-in-verl",)},
)
MS_SWIFT = Places(
    {"": _OF_OPTIMIZER | _OF_MODEL_IN_MS_SWIFT},
    dict.fromkeys(_OF_OPTIMIZER, ("add-settings-to-ms-swift",))
    | dict.fromkeys(_OF_MODEL_IN_MS_SWIFT, ("add-settings-to-ms-swift", "train-heads-in-mcore-bridge")),
)


def sections_of(content: Mapping[Any, Any], name: str = "") -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield a configuration as ('', itself) and then each mapping in it, at any depth, with the last of its names."""
    yield name, content
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from sections_of(value, str(key))
