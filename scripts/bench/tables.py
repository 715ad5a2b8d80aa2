"""The tables of results, ratios first."""

from __future__ import annotations

from typing import Any

from megatron_mtp_patches.megatrons.known import REFERENCE

from scripts.common.markdown import Table
from scripts.study import count_ranks

Row = dict[str, Any]
NATIVE = f"native {REFERENCE}"
WITHOUT_KERNELS = (
    "Where neither TransformerEngine nor Apex is installed, Megatron's norm reads one number for each parameter, "
    "patched or not."
)


def tables(results: dict[str, Any]) -> list[Table]:
    makers = {"step": _steps, "import": _imports, "acceptance": _acceptance}
    return [table for name, make in makers.items() if name in results for table in make(results[name])]


def _steps(rows: list[Row]) -> list[Table]:
    times, calls = [], []
    for row in rows:
        place = [row["case"], str(row["ranks"]), row["release"]]
        ms = [f"{row['ms'][side]:.1f}" if side in row["ms"] else "" for side in ("unpatched", "patched", NATIVE)]
        ratios = [_ratio(row["patched / native"]), _ratio(row["patched / unpatched"])]
        measured = [f"{row['parameters']:,}", f"{row['starts']} x {row['turns']}"]
        times.append([*place, *ratios, *ms, *measured, _verdict(row)])
        sides = [row["a step"].get(side) for side in (NATIVE, "unpatched", "patched")]
        numbers = [
            " / ".join("-" if side is None or side[what] is None else f"{side[what]:g}" for side in sides)
            for what in ("all_reduces", "host_syncs", "launches")
        ]
        calls.append([*place, f"{row['a step']['patched']['rank sets']:g}", *numbers])
    place = ["optimizer", "ranks", "release"]
    columns = [*place, f"patched / {NATIVE}", "patched / unpatched"]
    columns += ["unpatched ms", "patched ms", f"{NATIVE} ms", "parameters", "starts x turns", "target"]
    counts = [*place, "sets of ranks", "all-reduces", "host-device syncs", "kernel launches"]
    return [
        Table("optimizer.step, medians (and their range over the starts)", columns, times, note=_noise(rows)),
        Table(f"In one optimizer.step: {NATIVE} / unpatched / patched", counts, calls, note=WITHOUT_KERNELS),
    ]


def _noise(rows: list[Row]) -> str:
    """Why a row may miss its target by little: the ratios of the same Megatron, started twice, by number of ranks."""
    ratios: dict[int, list[float]] = {}
    for row in rows:
        if row["release"] == REFERENCE:
            ratios.setdefault(row["ranks"], []).append(row["unpatched / native"]["median"])
    ranges = [f"{min(all_):.2f} to {max(all_):.2f} of its time on {count_ranks(n)}" for n, all_ in ratios.items()]
    if not ranges:
        return ""
    return (
        f"{REFERENCE} unpatched is {NATIVE}, started a second time. It took {', '.join(ranges)}: a row that misses by "
        f"no more than the same Megatron misses itself is not told from one that meets the target."
    )


def _imports(rows: list[Row]) -> list[Table]:
    cells = []
    for row in rows:
        loads = "yes" if row["loads torch"] else "no"
        cells.append([row["release"], f"{row['ms']:.1f}", loads, f"{row['apply s']:.2f}", _verdict(row)])
    columns = ["with", "import ms", "loads torch", "apply() s", "target"]
    return [Table("import megatron_mtp_patches, and apply() once Megatron is imported: CPU time", columns, cells)]


def _acceptance(rows: list[Row]) -> list[Table]:
    cells = []
    for row in rows:
        shape = [str(row[size]) for size in ("tokens", "vocabulary", "hidden")]
        ms = [f"{row[name]:.2f}" for name in ("ms", "one read ms")]
        ratios = [f"{row['ratio']:.2f}", f"{row['share of projection']:.3f}"]
        cells.append([*shape, *ratios, *ms, _verdict(row) if row["device"] == "gpu" else "only on a GPU"])
    columns = ["tokens", "vocabulary", "hidden", "counting / one read", "counting / projection"]
    columns += ["counting ms", "one read ms", "target"]
    return [Table("Acceptance counting, bf16 logits", columns, cells)]


def _ratio(ratio: dict[str, float] | None) -> str:
    return "not run" if ratio is None else "{median:.2f} ({least:.2f} to {largest:.2f})".format(**ratio)


def _verdict(row: Row) -> str:
    return f"misses: {'; '.join(row['misses'])}" if row["misses"] else "met"
