"""The known name that a user may have meant by an unknown one."""

from __future__ import annotations

import re
from collections.abc import Iterable


def find_similar(name: str, names: Iterable[str], cutoff: float) -> str:
    """The one of `names` that resembles `name`, whatever their case; '' for none.

    It has the same words in another order, or else it is the closest by its letters, with at least `cutoff` of 1.
    """
    from difflib import get_close_matches  # here, as few runs need it

    by_lower = {one.lower(): one for one in names}
    words = _words(name)
    close = [one for one in by_lower if _words(one) == words] or get_close_matches(
        name.lower(), by_lower, n=1, cutoff=cutoff
    )
    return by_lower[close[0]] if close else ""


def _words(name: str) -> list[str]:
    return sorted(re.split("[-_]+", name.lower()))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean ...?)` with the one of `names` that resembles `name`; '' for none."""
    similar = find_similar(name, names, cutoff=0.6)
    return f" (did you mean {similar}?)" if similar else ""
