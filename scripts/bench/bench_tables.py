"""The rows of scripts/bench.py as tables, ratios first."""

from __future__ import annotations

from typing import Any

from pythons import REFERENCE
from tables import Table

NATIVE = f"native {REFERENCE}"
WITHOUT_KERNELS = (
    "Where neither TransformerEngine nor Apex is installed, Megatron's own norm reads one number for each parameter, "
    "patched or not."
)


def tables(found: dict[str, Any]) -> list[Table]:
    makers = {"step": _steps, "import": _imports, "acceptance": _acceptance}
    return [table for name, make in makers.items() if name in found for table in make(found[name])]


def _steps(rows: list[dict[str, Any]]) -> list[Table]:
    times, calls = [], []
    for row in rows:
        place = [row["case"], str(row["ranks"]), row["release"]]
        ms = [f"{row['ms'][side]:.1f}" if side in row["ms"] else "" for side in ("unpatched", "patched", NATIVE)]
        ratios = [_ratio(row["patched / native"]), _ratio(row["patched / unpatched"])]
        times.append([*place, *ratios, *ms, _misses(row)])
        sides = [row["a step"].get(side) for side in (NATIVE, "unpatched", "patched")]
        numbers = [
            " / ".join("-" if side is None or side[what] is None else f"{side[what]:g}" for side in sides)
            for what in ("all_reduces", "host_syncs", "launches")
        ]
        calls.append([*place, f"{row['a step']['patched']['rank sets']:g}", *numbers])
    place = ["optimizer", "ranks", "release"]
    which = f"{NATIVE} / unpatched / patched"
    return [
        Table(
            "optimizer.step, medians (and their range over the starts)",
            [
                *place,
                f"patched / {NATIVE}",
                "patched / unpatched",
                "unpatched ms",
                "patched ms",
                f"{NATIVE} ms",
                "target",
            ],
            times,
            _differs_from_itself(rows),
        ),
        Table(
            f"In one optimizer.step: {which}",
            [*place, "sets of ranks", "all-reduces", "waits of the host", "kernel launches"],
            calls,
            WITHOUT_KERNELS,
        ),
    ]


def _differs_from_itself(rows: list[dict[str, Any]]) -> str:
    """Why a row may miss by little: what the same Megatron, started twice, came to on each number of ranks."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if row["release"] == REFERENCE:
            found.setdefault(row["ranks"], []).append(row["unpatched / native"]["median"])
    if not found:
        return ""
    ranges = [
        f"{min(ratios):.2f} to {max(ratios):.2f} of its time on {ranks} rank{'s' * (ranks > 1)}"
        for ranks, ratios in found.items()
    ]
    return (
        f"{REFERENCE} unpatched is {NATIVE}, started a second time. It took {', '.join(ranges)}: a row that misses by "
        f"no more than the same Megatron misses itself is not told from one that meets the target."
    )


def _imports(rows: list[dict[str, Any]]) -> list[Table]:
    cells = [
        [
            row["release"],
            f"{row['ms']:.1f}",
            "yes" if row["loads torch"] else "no",
            f"{row['apply s']:.2f}",
            _misses(row),
        ]
        for row in rows
    ]
    columns = ["with", "import ms", "loads torch", "apply() s", "target"]
    return [Table("import megatron_mtp_patches, and apply() once Megatron is imported: CPU time", columns, cells)]


def _acceptance(rows: list[dict[str, Any]]) -> list[Table]:
    cells = []
    for row in rows:
        shape, ms = [str(row["tokens"]), str(row["vocabulary"])], [f"{row[name]:.2f}" for name in ("ms", "one read ms")]
        cells.append([*shape, f"{row['ratio']:.2f}", *ms, _misses(row) if row["device"] == "gpu" else "only on a GPU"])
    columns = ["tokens", "vocabulary", "counting / one read", "counting ms", "one read ms", "target"]
    return [Table("Acceptance counting, bf16 logits", columns, cells)]


def _ratio(found: dict[str, float] | None) -> str:
    return "not run" if found is None else "{median:.2f} ({least:.2f} to {largest:.2f})".format(**found)


def _misses(row: dict[str, Any]) -> str:
    return f"misses: {'; '.join(row['misses'])}" if row["misses"] else "met"
