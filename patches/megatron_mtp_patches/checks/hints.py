"""Known names that a user may have meant by an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean ...?)` with the one of `names` that resembles `name`, whatever their case; '' for none."""
    by_lower = {known.lower(): known for known in names}
    close = get_close_matches(name.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""
