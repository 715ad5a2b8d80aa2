"""What the tables that are kept under ci/ say, in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pythons import REFERENCE

BENCH = Path(__file__).resolve().parents[2] / "ci/bench/cpu.json"


def blocks() -> dict[str, str]:
    return {"cost": cost(json.loads(BENCH.read_text(encoding="utf-8")))}


def cost(found: dict[str, Any]) -> str:
    """Of what scripts/bench.py found: ratios, and how many rows meet the target."""
    rows = found["step"]
    ranks = _listed(sorted({row["ranks"] for row in rows}))
    met = sum(round(row["patched / native"]["median"], 2) <= 1 for row in rows)
    twice = _range(row["unpatched / native"] for row in rows if row["release"] == REFERENCE)
    native = _listed(sorted({f"{row['a step'][f'native {REFERENCE}']['all_reduces']:g}" for row in rows}), "or")
    ours = _listed(sorted({f"{row['a step']['patched']['all_reduces']:g}" for row in rows}), "or")
    import_ms = max(row["ms"] for row in found["import"])
    return "\n".join(
        [
            f"On {ranks} CPU ranks optimizer.step takes {_range(row['patched / native'] for row in rows)} of native "
            f"{REFERENCE}'s time, at most 1.00 in {met} of {len(rows)} rows;",
            f"native {REFERENCE}, started twice, takes {twice} of its own. It takes "
            f"{_range(row['patched / unpatched'] for row in rows)} of the time of the same release unpatched.",
            f"All-reduces in a step: {ours}; native has {native}. The import takes {import_ms:.0f} ms.",
        ]
    )


def _range(ratios: Iterable[dict[str, float]]) -> str:
    medians = [ratio["median"] for ratio in ratios]
    return f"{min(medians):.2f} to {max(medians):.2f}"


def _listed(some: list[Any], last: str = "and") -> str:
    return f" {last} ".join(filter(None, [", ".join(map(str, some[:-1])), str(some[-1])]))
