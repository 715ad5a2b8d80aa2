"""What was found, as rows: a number in each, a column for each loss."""

from __future__ import annotations

from typing import Any


def columns(found: dict[str, dict[str, Any]]) -> list[str]:
    return ["tokens per verification step", *found]


def numbers(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    names = [name for name in next(iter(found.values())) if name != "curve"]
    return [[name, *(f"{one[name]:.3f}" for one in found.values())] for name in names]
