"""What the tables that are kept under ci/ say, in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from scripts.common.arguments import REFERENCE
from scripts.common.process import ROOT

BENCH = ROOT / "ci" / "bench" / "cpu.json"


def blocks() -> dict[str, str]:
    return {"cost": cost(json.loads(BENCH.read_text(encoding="utf-8")))}


def cost(found: dict[str, Any]) -> str:
    """Of what `python -m scripts.bench` found: ratios, and how many rows meet the target."""
    rows = found["step"]
    ranks = ", ".join(map(str, sorted({row["ranks"] for row in rows})))
    met = sum(not row["misses"] for row in rows)
    twice = _range(row["unpatched / native"] for row in rows if row["release"] == REFERENCE)
    native, ours = (
        " or ".join(sorted({f"{row['a step'][side]['all_reduces']:g}" for row in rows}))
        for side in (f"native {REFERENCE}", "patched")
    )
    import_ms, apply_s = (max(row[what] for row in found["import"]) for what in ("ms", "apply s"))
    return "\n".join(
        [
            f"On {ranks} CPU ranks optimizer.step takes {_range(row['patched / native'] for row in rows)} of native "
            f"{REFERENCE}'s time; {met} of {len(rows)} rows meet the target, at most 1.00;",
            f"native {REFERENCE}, started twice, takes {twice} of its own. It takes "
            f"{_range(row['patched / unpatched'] for row in rows)} of the time of the same release unpatched.",
            f"All-reduces in a step: {ours}; native has {native}.",
            f"The import takes {import_ms:.0f} ms of CPU time, apply() {apply_s:.2f} s on each rank once Megatron is "
            f"imported.",
        ]
    )


def _range(ratios: Iterable[dict[str, float]]) -> str:
    medians = [ratio["median"] for ratio in ratios]
    return f"{min(medians):.2f} to {max(medians):.2f}"
