"""What a stage's files say, each figure against its target. Without a file the figure is "not run"."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "scripts" / folder) for folder in ("", "bench")]

NOT_RUN = "not run"


class Figure(NamedTuple):
    """`value` as a person reads it; `met` is None where it was not run, or not on a GPU."""

    what: str
    target: str
    value: str = NOT_RUN
    met: bool | None = None


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def make(what: str, target: str, value: float | None, met: bool, text: str = "{:.3f}") -> Figure:
    return Figure(what, target) if value is None else Figure(what, target, text.format(value), met)


def suites(folder: Path, device: str) -> list[Figure]:
    log = folder / "log"
    last = log.read_text(errors="replace").rstrip().rpartition("\n")[2] if log.is_file() else ""
    counts = Counter({word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)})
    failed = counts["failed"] + counts["error"] + counts["errors"]
    value = float(failed) if counts else None
    return [make("own tests that fail", "0", value, failed == 0, f"{{:.0f}} of {failed + counts['passed']}")]


def replay(folder: Path, device: str) -> list[Figure]:
    found = [read(file) for file in sorted(folder.glob(f"{device}*/*.json"))]
    verdicts: Counter[str] = sum((Counter(totals) for one in found for totals in one["totals"].values()), Counter())
    new = verdicts["newly failing"]
    text = f"{{:.0f}} of {verdicts.total()}"
    return [make("upstream's tests that fail newly", "0", float(new) if verdicts else None, new == 0, text)]


def training(folder: Path, device: str) -> list[Figure]:
    runs = (read(folder / "training.json") or {"runs": {}})["runs"]

    def ratio(name: str, other: str, what: str = "ms") -> float | None:
        pair = [runs.get(each, {}).get(what) for each in (name, other)]
        return None if None in pair else pair[0] / pair[1]

    off, on = ratio("patched", "unpatched"), ratio("patched, all flags", "unpatched")
    memory = ratio("patched, all flags", "unpatched", "peak MB")
    native, native_on = ratio("unpatched", "native"), ratio("native, its flags", "native")
    return [
        make("training step, all flags / unpatched", "< 1.01", on, (on or 0.0) < 1.01),
        make("training step, patched / unpatched", "< 1.01", off, (off or 0.0) < 1.01),
        make("training step, native 0.19 with its flags / without", "", native_on, True),
        make("training step, unpatched / native 0.19", "", native, True),
        make("peak memory, all flags / unpatched", "", memory, True),
    ]


def step(folder: Path, device: str) -> list[Figure]:
    from pythons import REFERENCE

    rows = (read(folder / f"{device}.json") or {}).get("step", [])
    ratios = [row["patched / native"]["median"] for row in rows if row["patched / native"]]
    worst = max(ratios, default=None)
    counts = [row["a step"]["patched"] for row in rows]
    reduced = max((count["all_reduces"] / count["rank sets"] for count in counts), default=None)

    def against_native(what: str) -> float | None:
        pairs = [
            (row["a step"]["patched"][what], row["a step"].get(f"native {REFERENCE}", {}).get(what)) for row in rows
        ]
        return max((ours / theirs for ours, theirs in pairs if ours is not None and theirs), default=None)

    return [
        make("optimizer.step, patched / native 0.19.2, worst row", "<= 1.00", worst, round(worst or 0.0, 2) <= 1.0),
        make("all-reduces for each set of ranks", "1", reduced, reduced == 1.0, "{:g}"),
        make("waits of the host, patched / native 0.19.2, worst row", "", against_native("host_syncs"), True),
        make("kernel launches, patched / native 0.19.2, worst row", "", against_native("launches"), True),
    ]


def acceptance(folder: Path, device: str) -> list[Figure]:
    from ratios import ACCEPTANCE_LIMIT

    rows = (read(folder / f"{device}.json") or {}).get("acceptance", [])
    times = rows[0]["ratio"] if rows else None
    met = (times or 0.0) <= ACCEPTANCE_LIMIT
    return [make("acceptance counting / one read of the logits", f"<= {ACCEPTANCE_LIMIT}", times, met)]


def memory(folder: Path, device: str) -> list[Figure]:
    record = (read(folder / "memory.json") or {}).get("fsdp-without-master-weights")
    what, target = "bytes saved by Megatron-FSDP without master weights / 4 for each parameter", "0.98 to 1.02"
    if record is None:
        return [Figure(what, target)]
    before, after = record["without"][0], record["with"][0]
    theory = after["saves"]["optimizer_state"]
    found = [(what, before["held"]["optimizer_state"] - after["held"]["optimizer_state"])]
    for name in after.get("allocator", {}):
        found.append((f"{what}, {name}", before["allocator"][name] - after["allocator"][name]))
    if found[0][1] == 0:
        return [Figure(what, target, "this release keeps none by itself")]
    return [make(name, target, saved / theory, 0.98 <= saved / theory <= 1.02) for name, saved in found]


def muon(folder: Path, device: str) -> list[Figure]:
    losses = (read(folder / "muon.json") or {"losses": {}})["losses"]
    found = {name: losses.get(f"Muon, {name}", {}).get("1e+14") for name in ("unpatched", "exempt from clipping")}
    what = "loss that one loud layer leaves Muon, bf16"
    stalled, free = found.values()
    return [
        make(f"{what}, unpatched", "> 0.5", stalled, (stalled or 1.0) > 0.5),
        make(f"{what}, exempt from clipping", "< 0.01", free, (free or 0.0) < 0.01),
    ]
