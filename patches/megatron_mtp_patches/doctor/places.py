"""Where the settings of the patches stand in the configuration of each trainer: the only list of these places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

from ..catalog import SETTINGS, SETTINGS_OF_OPTIMIZER
from ..declarations.settings import Setting


@dataclass(frozen=True)
class Places:
    """The sections of a trainer's configuration from which settings of the patches are read.

    Attributes:
        sections: {a section, by the end of its dotted name: the names of the settings}; the section '' is the whole
            configuration.
        carriers: {a setting: the ids of the patches without which this trainer does not act on it}, beside its own.
        why_others_are_idle: the trainer that does not act on other settings, and why; '' if there are none.
    """

    sections: Mapping[str, frozenset[str]]
    carriers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    why_others_are_idle: str = ""

    def settings_in(self, section: str) -> frozenset[str]:
        """The names of the settings that are read from the section with this dotted name."""
        ends = (names for end, names in self.sections.items() if f".{section}".endswith(f".{end}"))
        return next(ends, frozenset())

    def home_of(self, name: str, section: str = "") -> str:
        """The section from which the setting is read, of several the one that shares most sections with `section`.

        '' for the whole configuration, or if there is none.
        """
        homes = [home for home, names in self.sections.items() if name in names]
        return max(homes, key=lambda home: len(commonprefix([home.split("."), section.split(".")])), default="")


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
_VERL_CARRIERS = {
    _SCHEDULE: ("schedule-mtp-loss-weight-in-verl",),
    # Without it verl ends at the first update that is skipped.
    "grad_norm_skip_threshold": ("skip-updates-in-verl",),
    "mtp_grad_norm_skip_threshold": ("skip-updates-in-verl",),
}


def _verl(engines: Iterable[str], optimizers: Iterable[str]) -> Places:
    """The places of verl, by the names of its sections of engines and optimizers, each with its dot."""
    models = {f"{name}override_transformer_config": _MODEL_SETTINGS for name in engines}
    return Places(
        models | {f"{name}override_optimizer_config": _OPTIMIZER_SETTINGS for name in optimizers}, _VERL_CARRIERS
    )


VERL_PPO = _verl(
    ("actor_rollout_ref.actor.megatron.", "actor_rollout_ref.ref.megatron.", "critic.megatron."),
    ("actor_rollout_ref.actor.optim.", "critic.optim."),
)
VERL_SFT = _verl(["engine."], ["optim."])
VERL_ENGINE = _verl([""], [""])  # which knows no section around the two
MS_SWIFT = Places(
    {"": _OPTIMIZER_SETTINGS | _SWIFT_MODEL_SETTINGS},
    dict.fromkeys(_OPTIMIZER_SETTINGS, ("add-settings-to-ms-swift",))
    | dict.fromkeys(_SWIFT_MODEL_SETTINGS, ("add-settings-to-ms-swift", "train-heads-in-mcore-bridge")),
    "ms-swift, whose trainer and models do not read it",
)


def sections_of(content: Mapping[Any, Any], name: str = "") -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield a configuration as (`name`, itself) and then each mapping in it, at any depth, with its dotted name."""
    yield name, content
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from sections_of(value, join(name, str(key)))


def join(section: str, name: str) -> str:
    """The dotted name of what has this name in a section."""
    return f"{section}.{name}" if section else name
