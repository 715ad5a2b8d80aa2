"""How errors name a setting, and checks of a setting by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def spell(name: str) -> str:
    """Return `--mtp-clip-grad (config.mtp_clip_grad)`: frameworks with configurations have no flags."""
    return f"--{name.replace('_', '-')} (config.{name})"


def check_switches(settings: Any, names: Iterable[str]) -> None:
    """Raise ValueError if one of these settings is neither True nor False: a string, even "false", would turn it on."""
    for name in names:
        value = getattr(settings, name, None)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{spell(name)} {value!r}: give True or False")


def check_counts(settings: Any, units: Mapping[str, str]) -> None:
    """Raise ValueError if one of these settings is no whole number, or negative.

    Args:
        units: what each setting counts, and what 0 means, for the message.
    """
    for name, unit in units.items():
        value = getattr(settings, name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{spell(name)} {value!r}: give a number of {unit}")
