"""`parity -- FLAGS`: does this run compute the same numbers on every parallel layout?"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import status
from ..engine import UsageError
from ..engine.state import State
from ..megatrons.installed import describe_megatron
from ..parity.processes import prepare
from ..parity.small import SmallRun, shrink
from ..parity.study import Result, Study
from .console import make_printer

GOES_AWAY, STAYS = 1, 3  # exit codes
SHOWN = 4  # deviations of a cut
SCRIPT = "pretrain_gpt.py"
Show = Callable[..., None]


def compare_cuts(words: list[str], script: str | None, most_ranks: int, data: str, dtype: str, as_json: bool) -> int:
    """Train a small copy of a run on one rank and on each cut of its layout, and print what differs.

    Returns 0 if every cut that trains equals one rank, 1 if the cuts that do not would with all patches, 3 otherwise.

    Args:
        words: the flags, as after the name of the script.
        script: the file that a user starts; None for pretrain_gpt.py here or beside Megatron.
        most_ranks: of a cut.
        data: "uneven" loss masks, or "whole" ones.
        dtype: "fp32" or "bf16", of the small run.
        as_json: print one JSON object at the end, and nothing before.

    Raises:
        PatchError: the script does not import.
        UsageError: there is no script, or the run made small does not train on one rank.
    """
    start = time.monotonic()
    show: Show = (lambda *_, **__: None) if as_json else make_printer()
    file = _find_script(script)
    os.environ["MEGATRON_MTP_PATCHES_DEFECTS"] = "off"  # the line of known defects; this command says them
    with _Quiet():
        prepare(file)
        small = shrink(words, dtype)
        all_are_applied = all(report.state is not State.DISABLED for report in status())
    _show_run(show, file, small, data)
    study = Study(file, small, data, all_are_applied)
    show(f"one rank: trained (weights {study.draw + 1}), {time.monotonic() - start:.0f} s since the start")
    for note in study.notes:
        show(note, style="yellow")
    results = []
    for result in study.results(most_ranks):
        results.append(result)
        _show_result(show, result)
    code = _exit_code(results)
    if as_json:
        print(json.dumps(_describe(study, results, code), indent=1))
    else:
        _show_summary(show, results, time.monotonic() - start)
    return code


def _find_script(script: str | None) -> str:
    if script is not None:
        if not Path(script).is_file():
            raise UsageError(f"no such script: {script}")
        return script
    import importlib.util

    megatron = importlib.util.find_spec("megatron.core")
    roots = [Path.cwd(), *([Path(str(megatron.origin)).parents[2]] if megatron and megatron.origin else [])]
    for root in roots:
        if (root / SCRIPT).is_file():
            return str(root / SCRIPT)
    raise UsageError(
        f"parity trains with Megatron-LM's {SCRIPT}, which no wheel has, and found none here or beside "
        f"{describe_megatron()}: run it in a checkout, or name the script of the run with --script"
    )


class _Quiet:
    """Sends what Megatron and the script print while they are imported to nowhere."""

    def __enter__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.kept = os.dup(1), os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in enumerate(self.kept, 1):
            os.dup2(file, number)
            os.close(file)


def _show_run(show: Show, script: str, small: SmallRun, data: str) -> None:
    show(f"{describe_megatron()}; {script} in a rehearsal on the CPU, attention in float32 under context parallelism")
    for reason, flags in small.left_out.items():
        show(f"left out, because {reason}: {'; '.join(map(str, flags))}")
    show(f"made small, or added: {' '.join(map(str, small.changed))}")
    show(f"loss masks: {data}\n")


def _show_result(show: Show, result: Result) -> None:
    head = f"{result.cut.name} ({result.cut.ranks} ranks, {result.seconds:.1f} s)"
    if result.verdict is None:
        show(f"{head}: does not train: {result.refusal}", style="yellow")
        return
    if result.findings:
        show(f"{head}: {len(result.findings)} quantities are not those of one rank", style="bold red")
        for one in result.findings[:SHOWN]:
            size = "absent in one of the two" if one.size == float("inf") else f"{one.size:.2g} of it"
            show(f"    {one.kind} {one.name}, step {one.step}: off by {size}")
    else:
        show(f"{head}: equal", style="green")
    for dependence, deviations in result.verdict.dependences.items():
        worst = deviations[0]
        show(f"    as Megatron defines it: {dependence.reason} ({worst.kind} {worst.name}: {worst.size:.2g})")
    for defect, is_confirmed in result.explanations:
        confirmed = {True: "; confirmed: with it alone, this cut is equal", False: "; with it alone, it still differs"}
        way = f"patch {defect.patch}" if defect.patch else defect.remedy
        show(f"    known: {defect.id}: {defect.text} ({way}{confirmed.get(is_confirmed, '')})")  # type: ignore[arg-type]
    if result.findings and not result.explanations:
        show("    no known defect explains it")
    if result.goes_away is not None:
        show(f"    with all patches it {'is equal' if result.goes_away else 'still differs'}")


def _show_summary(show: Show, results: list[Result], seconds: float) -> None:
    differing = [one.cut.name for one in results if one.findings]
    refused = [one.cut.name for one in results if one.verdict is None]
    equal = len(results) - len(differing) - len(refused)
    parts = [f"{equal} of {len(results)} cuts are equal to one rank"]
    if differing:
        parts.append(f"these differ: {', '.join(differing)}")
    if refused:
        parts.append(f"these do not train: {', '.join(refused)}")
    show(f"\n{'; '.join(parts)} ({seconds:.0f} s)")


def _exit_code(results: list[Result]) -> int:
    differing = [one for one in results if one.findings]
    if not differing:
        return 0
    return GOES_AWAY if all(one.goes_away for one in differing) else STAYS


def _describe(study: Study, results: list[Result], code: int) -> dict[str, Any]:
    return {
        "megatron": describe_megatron(),
        "left_out": {reason: list(map(str, flags)) for reason, flags in study.small.left_out.items()},
        "changed": list(map(str, study.small.changed)),
        "notes": study.notes,
        "exit_code": code,
        "cuts": [
            {
                "name": one.cut.name,
                "ranks": one.cut.ranks,
                "seconds": round(one.seconds, 2),
                "flags": shlex.join(word for flag in one.cut.flags for word in (flag.name, *flag.values)),
                "refused": one.refusal,
                "findings": [dict(zip(finding._fields, finding, strict=True)) for finding in one.findings],
                "as_defined": [dependence.reason for dependence in one.verdict.dependences] if one.verdict else [],
                "explanations": [
                    {"id": defect.id, "patch": defect.patch, "is_confirmed": confirmed}
                    for defect, confirmed in one.explanations
                ],
                "goes_away_with_all_patches": one.goes_away,
            }
            for one in results
        ],
    }
