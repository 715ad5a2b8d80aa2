"""ci/gpu: what was seen on a GPU, as one page, and in a sentence for the README."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

from scripts import study
from scripts.bench import tables as bench
from scripts.common.markdown import Table
from scripts.common.process import ROOT

from .machine import A_CPU, MachineError

KEPT = ROOT / "ci" / "gpu" / "gpu.json"
WARM_UP = 10  # steps
LIMITS = (
    "One GPU and one rank: nothing was sent between GPUs. Adam is torch's unless Apex or TransformerEngine is named."
)
BASES = ("unpatched", "unpatched, again")
Results = dict[str, Any]


def take(folders: list[Path]) -> None:
    """Add what these folders hold to ci/gpu, and write its page. A stage that was run again replaces the earlier one.

    Raises:
        MachineError: a folder has no results, those of a rehearsal, or those of another machine than the others.
    """
    results = read_kept() or {"stages": {}}
    for folder in folders:
        files = sorted(folder.glob("*.json"))
        if not files:
            raise MachineError(f"{folder} has no results: give the OUT of `python -m scripts.gpu run`")
        for file in files:
            merge(results, file)
    study.write(KEPT.with_suffix(""), results, "What was seen on a GPU", make_tables(results), about(results))
    print(f"{KEPT.with_suffix('.md')} is written. `PYTHONPATH=patches python3 -m scripts.docs` makes the pages say it.")


def merge(results: Results, file: Path) -> None:
    """Add the stages of one command to `results`."""
    try:
        command = json.loads(file.read_text(encoding="utf-8"))
        machine, versions = command["machine"], command["stages"]["install"]["versions"]
    except (ValueError, TypeError, KeyError) as error:
        raise MachineError(f"{file} is not what `python -m scripts.gpu run` writes") from error
    if machine == A_CPU:
        raise MachineError(f"{file} is of a rehearsal on a CPU, which shows nothing of a GPU")
    place = {"machine": machine, "versions": versions}
    if results.setdefault("place", place) != place:
        raise MachineError(f"{file} is of another machine or other versions than {KEPT}: remove that, or take neither")
    for name, outcome in command["stages"].items():
        if name != "install" and not outcome["state"].startswith("left out") or name not in results["stages"]:
            results["stages"][name] = outcome


def read_kept() -> Results | None:
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else None


def about(results: Results) -> str:
    """The machine, what it had, and what it lacked."""
    machine, versions = results["place"]["machine"], results["place"]["versions"]
    absent = [
        name
        for name, package in (("TransformerEngine", "transformer-engine"), ("Apex", "apex"))
        if package not in versions
    ]
    lacked = f" Not installed: {' and '.join(absent)}." if absent else ""
    return (
        f"{LIMITS}{lacked} Made by `python -m scripts.gpu` on {machine}: {', '.join(map(' '.join, versions.items()))}."
    )


def make_tables(results: Results) -> list[Table]:
    stages = results["stages"]
    tables = [outcomes(stages)]
    for release, variants in trainings(stages).items():
        tables += [summary(release, variants), steps(release, variants)]
    results = {name: outcome["result"] for name, outcome in stages.items() if outcome.get("result")}
    if upstream := results.get("upstream's tests"):
        tables += upstream_tables(upstream)
    for name in ("step", "acceptance"):
        if name in results:
            tables += bench.tables({name: results[name][name]})
    if losses := results.get("losses"):
        tables.append(losses_table(losses))
    if seen := results.get("reproductions"):
        rows = [[name, one["state"], one["said"]] for name, one in sorted(seen.items())]
        tables.append(
            Table("Standalone files of known defects", ["defect", "on this GPU", "what the file printed"], rows)
        )
    return tables


def outcomes(stages: Results) -> Table:
    rows = []
    for name, one in stages.items():
        counts = (one.get("result") or {}).get("counts")
        tests = ", ".join(f"{count} {what}" for what, count in counts.items()) if counts else ""
        rows.append([name, one["state"], f"{one['seconds']:.0f}", tests])
    return Table("Stages", ["stage", "outcome", "seconds", "tests"], rows, right=[2])


def trainings(stages: Results) -> dict[str, dict[str, Results]]:
    """{release: {variant: what its training wrote}}"""
    releases: dict[str, dict[str, Results]] = {}
    for name, outcome in stages.items():
        match, result = re.fullmatch(r"training ([\d.]+), (.*)", name), outcome.get("result")
        if match and result and result["steps"]:
            releases.setdefault(match[1], {})[match[2]] = {**result, "outcome": outcome["state"]}
    return releases


def summary(release: str, variants: dict[str, Results]) -> Table:
    """Each variant against the first unpatched run."""
    base = variants.get(BASES[0]) or next(iter(variants.values()))
    rows = []
    for variant, run in variants.items():
        differences = [describe(largest_difference(run, base, what)) for what in ("loss", "heads", "norm")]
        peak, ratio = run["peak bytes"] / 2**30, step_ms(run) / step_ms(base)
        ran = f"{len(run['steps'])}" if run["outcome"] == "passed" else f"{len(run['steps'])}, {run['outcome']}"
        times = [f"{step_ms(run):.1f}", f"{ratio:.3f}", f"{peak:.2f}"]
        rows.append([variant, ran, *times, *differences, first_difference(run, base) or "none: the bits are equal"])
    note = (
        f"pretrain_gpt.py of core_v{release} with `{base['flags']}`. Time: the median of the steps after the first "
        f"{WARM_UP}, between CUDA events. Differences are the largest of the steps that both runs have, relative to "
        f"the first row. `{BASES[1]}` is the same run once more: a difference no larger than its own says nothing "
        f"about the patches."
    )
    columns = ["run", "steps", "ms of a step", "/ unpatched", "peak GiB", "loss", "heads' loss", "norm"]
    columns.append("first step that differs")
    return Table(f"Training of {release}", columns, rows, range(2, 8), note=note)


def describe(difference: float) -> str:
    return f"{difference:.1e}" if isfinite(difference) else "not finite"


def steps(release: str, variants: dict[str, Results]) -> Table:
    rows = [
        [str(number), *(f"{one['loss']!r}, {one['norm']!r}" for one in row)]
        for number, row in enumerate(zip(*(run["steps"] for run in variants.values()), strict=False), 1)
    ]
    return Table(f"Loss and gradient norm of each step, {release}", ["step", *variants], rows)


def step_ms(run: Results) -> float:
    """The median of a run's steps after the first ones; of all, if it was ended among those."""
    return median(step["ms"] for step in run["steps"][WARM_UP:] or run["steps"])


def pairs(run: Results, base: Results, what: str) -> Iterator[tuple[int, float, float]]:
    """(step, number of this run, number of the other run)"""
    for number, (ours, theirs) in enumerate(zip(run["steps"], base["steps"], strict=False), 1):
        if what == "heads":
            yield from ((number, one, other) for one, other in zip(ours[what], theirs[what], strict=False))
        elif ours[what] is not None and theirs[what] is not None:
            yield number, ours[what], theirs[what]


def largest_difference(run: Results, base: Results, what: str) -> float:
    """Relative; infinity where a number is not finite."""
    differences = [abs(ours - theirs) / abs(theirs or 1.0) for _, ours, theirs in pairs(run, base, what)]
    return max((one if isfinite(one) else inf for one in differences), default=0.0)


def first_difference(run: Results, base: Results) -> str:
    """The first step with another loss or norm; '' if all are the same bits."""
    different = [
        number for what in ("loss", "heads", "norm") for number, one, other in pairs(run, base, what) if one != other
    ]
    return str(min(different)) if different else ""


def upstream_tables(result: Results) -> list[Table]:
    (counts,) = result["totals"].values()
    causes = result["causes of the rest"].get("1", {})
    rows = [[word, cause, str(count)] for word, by_cause in causes.items() for cause, count in by_cause.items()]
    return [
        Table(
            "Upstream's unit tests, unpatched and patched", list(counts), [[str(count) for count in counts.values()]]
        ),
        Table("Upstream's unit tests that do not pass", ["verdict", "cause", "tests"], rows, right=[2]),
    ]


def losses_table(result: Results) -> Table:
    whole, read = result["rows"][0], result["one read ms"]
    rows = [
        [
            f"{row['loss']}, {'whole logits' if not row['chunk'] else 'chunks'}",
            f"{row['peak bytes'] / 2**30:.2f}",
            f"{row['peak bytes'] / whole['peak bytes']:.3f}" if whole["peak bytes"] else "",
            f"{row['ms']:.2f}",
            f"{row['ms'] / read:.1f}" if read else "",
        ]
        for row in result["rows"]
    ]
    sizes = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    note = (
        f"Forward and backward of one attached head: {sizes}. One read of the logits takes {read:.2f} ms, half a copy."
    )
    columns = ["loss", "peak GiB", "/ whole logits", "ms", "/ one read"]
    return Table("Losses of heads", columns, rows, range(1, 5), note=note)


def sentence(results: Results | None, docs: str, ci: str) -> str:
    """What the pages say: nothing has run, or what was seen, whatever it was.

    Args:
        docs: the path of the folder of the pages, from the page with the sentence.
        ci: that of the tables.
    """
    if results is None:
        return (
            f"**Nothing has been run on a GPU yet**, nor with Apex. [Two commands]({docs}gpu.md) are prepared for a "
            f"machine with one GPU, not run."
        )
    stages, machine = results["stages"], results["place"]["machine"]
    passed = sum(one["state"] == "passed" for one in stages.values())
    parts = [f"On one GPU ({machine}; no second rank) {passed} of {len(stages)} stages passed"]
    for release, variants in trainings(stages).items():
        if {BASES[0], "repairs"} <= variants.keys():
            base, repairs = variants[BASES[0]], variants["repairs"]
            ratio, difference = step_ms(repairs) / step_ms(base), largest_difference(repairs, base, "loss")
            number = min(len(base["steps"]), len(repairs["steps"]))
            losses = f"differed by at most {difference:.0e}" if isfinite(difference) else "were not all finite"
            parts.append(
                f"a step of {release} with the repairs took {ratio:.3f} of its time without, and its losses "
                f"{losses} in {number} steps"
            )
    upstream = (stages.get("upstream's tests") or {}).get("result")
    if upstream:
        (counts,) = upstream["totals"].values()
        parts.append(f"{counts['newly failing']} of upstream's tests newly failed")
    return f"{'; '.join(parts)} ([tables]({ci}gpu/gpu.md)). Nothing has been run on several GPUs."
