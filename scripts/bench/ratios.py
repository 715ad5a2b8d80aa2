"""Medians, and ratios of steps that were measured side by side."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from megatron_mtp_patches.megatrons.known import REFERENCE


class Side(NamedTuple):
    """One Megatron in one case: of each start of its processes the seconds of the steps, one for each turn."""

    starts: list[list[float]]
    counts: dict[str, float | None]

    @property
    def milliseconds(self) -> float:
        return 1e3 * median(second for one in self.starts for second in one)


def ratio(side: Side, other: Side) -> dict[str, float]:
    """Of steps taken one right after the other: the median of each start, and of those the median and the range.

    The range matters: a Megatron that is started twice differs from itself.
    """
    pairs = zip(side.starts, other.starts, strict=True)
    ratios = [median(a / b for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs]
    return {"median": median(ratios), "least": min(ratios), "largest": max(ratios)}


def step_row(
    case: str, ranks: int, release: str, parameters: int, unpatched: Side, patched: Side, native: Side | None = None
) -> dict[str, Any]:
    """`native` is REFERENCE without the patches, if that was measured."""
    sides = {"unpatched": unpatched, "patched": patched, **({f"native {REFERENCE}": native} if native else {})}
    against_native = ratio(patched, native) if native else None
    misses = []
    if against_native and round(against_native["median"], 2) > 1.0:
        misses.append(f"{against_native['median']:.2f} of native {REFERENCE}'s time, not at most 1.00")
    all_reduces, rank_sets = patched.counts["all_reduces"], patched.counts["rank sets"]
    if all_reduces != rank_sets:
        misses.append(f"{all_reduces:g} all-reduces for {rank_sets:g} sets of ranks")
    return {
        "case": case,
        "ranks": ranks,
        "release": release,
        "parameters": parameters,
        "starts": len(patched.starts),
        "turns": len(patched.starts[0]),
        "ms": {name: side.milliseconds for name, side in sides.items()},
        "patched / unpatched": ratio(patched, unpatched),
        "patched / native": against_native,
        "unpatched / native": ratio(unpatched, native) if native else None,
        "a step": {name: side.counts for name, side in sides.items()},
        "misses": misses,
    }
