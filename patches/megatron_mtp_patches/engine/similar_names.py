"""The known name that a user may have meant by an unknown one."""

from __future__ import annotations

from collections.abc import Iterable


def find_similar(name: str, names: Iterable[str], cutoff: float) -> str:
    """The one of `names` that resembles `name` most, whatever their case, by at least `cutoff` of 1; '' for none."""
    from difflib import get_close_matches  # here, as few runs need it

    by_lower = {known.lower(): known for known in names}
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean ...?)` with the one of `names` that resembles `name`; '' for none."""
    similar = find_similar(name, names, cutoff=0.6)
    return f" (did you mean {similar}?)" if similar else ""
