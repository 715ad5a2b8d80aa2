"""What was found, as a table."""

from __future__ import annotations

from typing import Any

from scripts.common.markdown import Table
from scripts.experts.conditions import RANKS, WITH_REPLICAS

PATCH = "count-experts-in-grad-norm"
TOLERANCE = 1e-5
TITLE = "Norms of a mixture of experts, as parts of those of all gradients"
NAMES = ("norm", "MTP norm", "zeros", "parameters")  # of Norms


def make_table(found: list[dict[str, Any]]) -> Table:
    """A row for each condition; for each release what is reported without the patch, and how far off it is with it."""
    plain, patched = ([one for one in found if one["patched"] is side] for side in (False, True))
    columns = ["condition"]
    for one in plain:
        columns += [f"{one['versions']['megatron-core']}, TE {one['versions']['transformer-engine']}", "patched"]
    rows = []
    for number, condition in enumerate(row["condition"] for row in plain[0]["rows"]):
        cells = [condition]
        for before, after in zip(plain, patched, strict=True):
            cells += [parts(before["rows"][number]), deviation(after["rows"][number])]
        rows.append(cells)
    for optimizer in plain[0]["replicas apart"]:
        sides = (one for pair in zip(plain, patched, strict=True) for one in pair)
        differences = (f"{one['replicas apart'][optimizer]:.2g}" for one in sides)
        rows.append([f"{WITH_REPLICAS}, {optimizer}: copies of an expert, apart", *differences])
    torch = sorted({one["versions"]["torch"].partition("+")[0] for one in found})
    note = (
        f"Without the patch {PATCH}: what is reported, as a part of what all gradients give, gathered by hand (1: all "
        "of it). Patched: the largest relative difference of these numbers. Last rows: the largest difference of a "
        "weight between ranks that hold the same expert, after three steps with learning rate 0.01. Megatron refuses "
        f"biases of experts with ETP larger than 1. {RANKS} ranks of a rehearsal; TE: TransformerEngine; torch "
        f"{', '.join(torch)}."
    )
    return Table(TITLE, columns, rows, note=note)


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """What is reported as parts of what is there, by the names of NAMES; nothing of what was not measured."""
    pairs = zip(NAMES, row["by hand"], row.get("reported", ()), strict=False)
    return {name: there / right for name, right, there in pairs if None not in (right, there)}


def parts(row: dict[str, Any]) -> str:
    if "not run" in row:
        return "not run"
    missing = [f"{name} {part:.4f}" for name, part in ratios(row).items() if abs(part - 1.0) > TOLERANCE]
    return ", ".join(missing) or "1"


def largest_deviation(row: dict[str, Any]) -> float:
    return max((abs(part - 1.0) for part in ratios(row).values()), default=0.0)


def deviation(row: dict[str, Any]) -> str:
    return "not run" if "not run" in row else f"{largest_deviation(row):.0e}"
