"""The tables of ci/acceptance and ci/starts."""

from __future__ import annotations

from typing import Any

from scripts.common.markdown import Table


def losses(lengths: dict[str, dict[str, Any]], note: str = "") -> Table:
    """A number in each row, a column for each loss."""
    names = [name for name in next(iter(lengths.values())) if name != "curve"]
    rows = [[name, *(f"{row[name]:.3f}" for row in lengths.values())] for name in names]
    columns = ["tokens per verification step", *lengths]
    return Table("Accepted lengths, logged and decoded", columns, rows, range(1, len(columns)), note=note)


def starts(curves: dict[str, list[tuple[int, float]]], note: str = "") -> Table:
    """A row for each start, a column for the steps at which the accepted length was measured."""
    steps = [str(step) for step, _ in next(iter(curves.values()))]
    columns = ["`--mtp-init`, accepted length after steps", *steps]
    rows = [[start, *(f"{length:.3f}" for _, length in curve)] for start, curve in curves.items()]
    return Table("Starts of MTP heads", columns, rows, range(1, len(columns)), note=note)
