"""Refuse learning rates and weight decays of MTP heads that cannot be meant."""

from __future__ import annotations

import math
from typing import Any

from megatron_overrides.mtp.rates.head_groups import SETTINGS
from megatron_overrides.settings.checks import spell


def check_rates(settings: Any) -> None:
    """Raise ValueError if `mtp_lr`, `mtp_min_lr` or `mtp_weight_decay` is below 0, inf or NaN, or a schedule rises."""
    for name in SETTINGS:
        value = getattr(settings, name, None)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0.0 <= value < math.inf):
            raise ValueError(
                f"{spell(name)} takes a finite number from 0 on, not {value!r}; where it is left out, MTP heads have "
                f"that of {spell(name.removeprefix('mtp_'))}"
            )
    rate, lowest = (_value_for_heads(settings, name) for name in ("lr", "min_lr"))
    has_rates = any(getattr(settings, name, None) is not None for name in ("mtp_lr", "mtp_min_lr"))
    if has_rates and None not in (rate, lowest) and rate < lowest:
        raise ValueError(
            f"the learning rate of MTP heads would rise from {rate} ({spell('mtp_lr')}, else {spell('lr')}) to "
            f"{lowest} ({spell('mtp_min_lr')}, else {spell('min_lr')}): give {spell('mtp_min_lr')}, {rate} or less"
        )


def _value_for_heads(settings: Any, name: str) -> Any:
    own = getattr(settings, f"mtp_{name}", None)
    return getattr(settings, name, None) if own is None else own
