"""Medians, and ratios of what was measured side by side."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from pythons import REFERENCE

IMPORT_LIMIT = 30.0  # ms
ACCEPTANCE_LIMIT = 1.5  # times one read of the logits

Rounds = list[list[float]]  # of each round the seconds of its steps


class Side(NamedTuple):
    """One Megatron in one case."""

    rounds: Rounds
    counts: dict[str, float | None]

    @property
    def milliseconds(self) -> float:
        return 1e3 * median(second for one in self.rounds for second in one)


def slowest(of_ranks: list[list[float]]) -> list[float]:
    """A step has ended when its last rank has."""
    return [max(times) for times in zip(*of_ranks, strict=True)]


def ratio(side: Side, other: Side) -> float:
    """The median over the rounds, in each of which both were measured one right after the other."""
    pairs = zip(side.rounds, other.rounds, strict=True)
    return median(median(ours) / median(theirs) for ours, theirs in pairs)


def step_row(case: str, ranks: int, release: str, plain: Side, patched: Side, native: Side | None) -> dict[str, Any]:
    """`native` is REFERENCE without the patches, if that was measured."""
    sides = {"unpatched": plain, "patched": patched, **({f"native {REFERENCE}": native} if native else {})}
    row: dict[str, Any] = {"case": case, "ranks": ranks, "release": release}
    row["ms"] = {name: side.milliseconds for name, side in sides.items()}
    row["patched / unpatched"] = ratio(patched, plain)
    row["patched / native"] = ratio(patched, native) if native else None
    row["a step"] = {name: side.counts for name, side in sides.items()}
    row["misses"] = list(_step_misses(row))
    return row


def _step_misses(row: dict[str, Any]) -> list[str]:
    found = []
    against_native = row["patched / native"]
    if against_native is not None and round(against_native, 2) > 1.0:
        found.append(f"{against_native:.2f} of native {REFERENCE}'s time, not at most 1.00")
    counts = row["a step"]["patched"]
    if counts["all_reduces"] != counts["rank sets"]:
        found.append(f"{counts['all_reduces']:g} all-reduces for {counts['rank sets']:g} sets of ranks")
    return found


def import_row(release: str, milliseconds: list[float], loaded_torch: bool) -> dict[str, Any]:
    taken = median(milliseconds)
    misses = [f"{taken:.1f} ms, not under {IMPORT_LIMIT:g}"] if taken >= IMPORT_LIMIT else []
    misses += ["it imports torch"] if loaded_torch else []
    return {"release": release, "ms": taken, "loads torch": loaded_torch, "misses": misses}


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
