"""Compare records with their reference, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

BITWISE = "bitwise"


class Difference(NamedTuple):
    """The difference between two records of a case.

    Attributes:
        largest: {kind of number: largest absolute difference}; empty if they are equal to the bit.
        first: the first place that differs, in words.
        cause: why this release is meant to differ, if that is the cause of all that differs.
    """

    largest: dict[str, float]
    first: str = ""
    cause: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{kind} {size:.1e}" for kind, size in self.largest.items()) or BITWISE

    @property
    def is_wrong(self) -> bool:
        return bool(self.largest) and not self.cause


def compare(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, Difference]:
    """Return how far `other` is from each case of `reference`."""
    if reference["ranks"] != other["ranks"]:
        raise SystemExit(f"one record is of {reference['ranks']} ranks, another of {other['ranks']}")
    return {name: _compare_case(case, other["cases"].get(name)) for name, case in reference["cases"].items()}


def _compare_case(reference: dict[str, Any], other: dict[str, Any] | None) -> Difference:
    if other is None:
        return Difference({"not recorded": math.inf}, "there is no such case")
    numbers, expected = dict(_flatten(other["ranks"])), dict(_flatten(reference["ranks"]))
    largest: dict[str, float] = {}
    first, cause = "", other["cause"]
    for place in {**expected, **numbers}:
        number, wanted = numbers.get(place, "nothing"), expected.get(place, "nothing")
        if _exactly(number) != _exactly(wanted):
            kind = place[4] if place[2] == "steps" else place[2]
            largest[kind] = max(largest.get(kind, 0.0), _size(number, wanted))
            text = f"{' '.join(map(str, place))}: {number} instead of {wanted}"
            if cause and not set(place) & set(other["cause of"]):
                first, cause = text, ""
            first = first or text
    return Difference(largest, first, cause)


def _flatten(value: Any, place: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Yield (place, number); a place is ("rank", its number, "steps", its number, kind, which ...)."""
    if isinstance(value, (dict, list)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _flatten(part, (*place, key) if place else ("rank", key))
    else:
        yield place, value


def _exactly(value: Any) -> str:
    """Return a text that differs for -0.0 and 0.0, and is the same for NaN and NaN, and for the counts 3 and 3.0."""
    return repr(float(value)) if isinstance(value, (int, float)) else str(value)


def _size(number: Any, wanted: Any) -> float:
    """Return the distance of two values: infinite if only one is a number, 0 of two hashes."""
    if isinstance(number, str) and isinstance(wanted, str):
        return 0.0
    if not isinstance(number, (int, float)) or not isinstance(wanted, (int, float)):
        return math.inf
    size = abs(number - wanted)
    return math.inf if math.isnan(size) else float(size)
