"""Checks the settings of a watch."""

from __future__ import annotations

from typing import Any

from megatron_overrides.settings.checks import spell


def check_action(settings: Any) -> None:
    """Raise ValueError if an action is asked for, and no watch that could take it."""
    if getattr(settings, "watch_action", "warn") != "warn" and not getattr(settings, "watch_invariants", 1):
        raise ValueError(
            f"{spell('watch_action')} {settings.watch_action} does nothing without a watch: give "
            f"{spell('watch_invariants')}, the number of steps from one check to the next, or leave it out"
        )
