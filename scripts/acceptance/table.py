"""What was found, as rows: a number in each, a column for each loss."""

from __future__ import annotations

from typing import Any


def columns(found: dict[str, dict[str, Any]]) -> list[str]:
    return ["tokens per verification step", *found]


def numbers(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    names = [name for name in next(iter(found.values())) if name != "curve"]
    return [[name, *(f"{one[name]:.3f}" for one in found.values())] for name in names]


def starts_columns(curves: dict[str, list[tuple[int, float]]]) -> list[str]:
    """The steps at which the accepted length was measured."""
    return ["`--mtp-init`, accepted length after steps", *(str(step) for step, _ in next(iter(curves.values())))]


def starts_numbers(curves: dict[str, list[tuple[int, float]]]) -> list[list[str]]:
    """A row for each start."""
    return [[start, *(f"{length:.3f}" for _, length in curve)] for start, curve in curves.items()]
