"""Medians, and ratios of what was measured side by side."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from pythons import REFERENCE

IMPORT_LIMIT = 30.0  # ms
APPLY_LIMIT = 0.35  # CPU-seconds
ACCEPTANCE_LIMIT = 1.5  # times one read of the logits


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
    found = [median(a / b for a, b in zip(ours, theirs, strict=True)) for ours, theirs in pairs]
    return {"median": median(found), "least": min(found), "largest": max(found)}


def step_row(
    case: str, ranks: int, release: str, unpatched: Side, patched: Side, native: Side | None = None
) -> dict[str, Any]:
    """`native` is REFERENCE without the patches, if that was measured."""
    sides = {"unpatched": unpatched, "patched": patched, **({f"native {REFERENCE}": native} if native else {})}
    row: dict[str, Any] = {"case": case, "ranks": ranks, "release": release}
    row["ms"] = {name: side.milliseconds for name, side in sides.items()}
    row["patched / unpatched"] = ratio(patched, unpatched)
    row["patched / native"] = ratio(patched, native) if native else None
    row["unpatched / native"] = ratio(unpatched, native) if native else None
    row["a step"] = {name: side.counts for name, side in sides.items()}
    row["misses"] = list(_step_misses(row))
    return row


def _step_misses(row: dict[str, Any]) -> list[str]:
    found = []
    against_native = row["patched / native"]
    if against_native and round(against_native["median"], 2) > 1.0:
        found.append(f"{against_native['median']:.2f} of native {REFERENCE}'s time, not at most 1.00")
    counts = row["a step"]["patched"]
    if counts["all_reduces"] != counts["rank sets"]:
        found.append(f"{counts['all_reduces']:g} all-reduces for {counts['rank sets']:g} sets of ranks")
    return found


def import_row(
    release: str, milliseconds: list[float], loaded_torch: bool, apply_seconds: list[float]
) -> dict[str, Any]:
    taken, applying = median(milliseconds), median(apply_seconds)
    misses = [f"{taken:.1f} ms, not under {IMPORT_LIMIT:g}"] if taken >= IMPORT_LIMIT else []
    misses += ["it imports torch"] if loaded_torch else []
    misses += [f"apply() takes {applying:.2f} s, not under {APPLY_LIMIT:g}"] if applying >= APPLY_LIMIT else []
    return {"release": release, "ms": taken, "loads torch": loaded_torch, "apply s": applying, "misses": misses}


def acceptance_row(release: str, found: dict[str, Any], device: str) -> dict[str, Any]:
    """`found` is what acceptance.py wrote. The target is a GPU's: a CPU computes for longer than it reads."""
    taken = median(found["seconds"])
    floor = median(found["copy seconds"]) / 2  # a copy reads and writes
    times = taken / floor
    misses = []
    if device == "gpu" and times > ACCEPTANCE_LIMIT:
        misses.append(f"{times:.2f} times one read, not at most {ACCEPTANCE_LIMIT:g}")
    shape = {"tokens": found["tokens"], "vocabulary": found["vocabulary"]}
    times_ms = {"ms": 1e3 * taken, "one read ms": 1e3 * floor}
    return {"release": release, "device": device, **shape, **times_ms, "ratio": times, "misses": misses}
