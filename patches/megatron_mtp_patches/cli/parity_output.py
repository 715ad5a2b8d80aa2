"""What `parity` prints of a study, for people and for programs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from .. import status
from ..megatrons.installed import describe_megatron
from ..parity.comparison import HIDDEN, Deviation
from ..parity.legitimate import Dependence
from ..parity.small import SmallRun
from ..parity.study import Explanation, Result, Study, applied_patches
from ..parity.training import FrameworkRun

SHOWN = 4  # deviations of a cut
Show = Callable[..., None]


def show_run(show: Show, script: str | FrameworkRun, small: SmallRun, data: str, ranks: int) -> None:
    trainer = script if isinstance(script, str) else script.trainer
    show(
        f"{describe_megatron()}, {describe_patches()}; {trainer} in a rehearsal on the CPU, fused attention in float32"
    )
    if not isinstance(script, str):
        show(f"not compared: {script.not_covered}")
    if applied_patches():
        show("MEGATRON_MTP_PATCHES=none compares Megatron as it is")
    for reason, flags in small.left_out.items():
        show(f"left out, because {reason}: {'; '.join(map(str, flags))}")
    show(f"made small, or added: {' '.join(map(str, small.changed))}")
    show(f"loss masks: {data}; cuts of at most {ranks} ranks")
    show("training on one rank, twice or more ...\n")


def describe_patches() -> str:
    """How many patches the compared trainings have."""
    applied, all_ids = applied_patches(), [report.id for report in status()]
    if not applied:
        return "without patches"
    return "with all patches" if len(applied) == len(all_ids) else f"with {len(applied)} of {len(all_ids)} patches"


def show_result(show: Show, result: Result) -> None:
    head = f"{result.cut.name} ({result.cut.ranks} ranks, {result.seconds:.1f} s)"
    if result.verdict is None:
        show(f"{head}: does not train: {result.refusal}", style="yellow")
        return
    if result.findings:
        show(f"{head}: {len(result.findings)} quantities are not those of one rank", style="bold red")
        for one in result.findings[:SHOWN]:
            show(f"    {one}")
        show(f"    {describe_beginning(result.verdict and result.verdict.begins)}")
    else:
        show(f"{head}: {'differs as Megatron defines it' if result.depends_on_cut else 'equal'}", style="green")
    show_dependences(show, result.verdict.dependences)
    for defect in result.not_told_apart:
        show(f"    known, and not told apart from that: {defect.id}: {defect.text} ({defect.remedy})")
    for explanation in result.explanations:
        show(f"    {describe_explanation(explanation)}")
    if confirmed := {str(one.defect.patch) for one in result.explanations if one.is_confirmed}:
        show(f"    confirmed: with {' and '.join(sorted(confirmed))} this cut is equal")
    if result.findings and not result.is_explained:
        show("    no known defect explains it")
        for name, is_equal in result.controls.items():
            show(f"    {name} it {'is equal' if is_equal else 'still differs'}")
    if result.goes_away is not None:
        show(f"    with all patches it {'is equal' if result.goes_away else 'still differs'}")


def show_dependences(show: Show, dependences: Mapping[Dependence, list[Deviation]]) -> None:
    for dependence, deviations in dependences.items():
        worst = deviations[0]
        show(f"    as Megatron defines it: {dependence.reason} ({worst.kind} {worst.name}: {worst.size:.2g})")


def describe_beginning(begins: Deviation | None) -> str:
    """Where the deviations begin."""
    if begins is None:
        return "it begins after the backward pass of the hidden states, or in a part that is not watched"
    backward = "in the backward pass, with the " if begins.kind == HIDDEN[1] else "with the "
    where = f"{begins.kind} after {begins.name}, of step {begins.step}"
    return f"it begins {backward}{where}: off by {begins.size:.2g} times its size"


def describe_explanation(explanation: Explanation) -> str:
    defect, is_confirmed = explanation
    differs = ", with which this cut still differs" if is_confirmed is False else ""
    return f"known: {defect.id}: {defect.text} ({f'patch {defect.patch}{differs}' if defect.patch else defect.remedy})"


def show_summary(show: Show, results: list[Result], seconds: float) -> None:
    differing = [one.cut.name for one in results if one.findings]
    refused = [one.cut.name for one in results if one.verdict is None]
    defined = [one.cut.name for one in results if one.depends_on_cut and not one.findings]
    equal = len(results) - len(differing) - len(refused) - len(defined)
    parts = [f"{equal} of {len(results)} cuts are equal to one rank, {describe_patches()}"]
    if differing:
        parts.append(f"these differ: {', '.join(differing)}")
    if defined:
        parts.append(f"these differ as Megatron defines it: {', '.join(defined)}")
    if refused:
        parts.append(f"these do not train: {', '.join(refused)}")
    show(f"\n{'; '.join(parts)} ({seconds:.0f} s)")


def describe_study(study: Study, results: list[Result]) -> dict[str, Any]:
    return {
        "left_out": {reason: list(map(str, flags)) for reason, flags in study.small.left_out.items()},
        "changed": list(map(str, study.small.changed)),
        "notes": study.notes,
        "patches": study.applied,
        "cuts": [_describe_result(one) for one in results],
    }


def _describe_result(one: Result) -> dict[str, Any]:
    begins = one.verdict.begins if one.verdict else None
    return {
        "name": one.cut.name,
        "ranks": one.cut.ranks,
        "seconds": round(one.seconds, 2),
        "flags": shlex.join(word for flag in one.cut.flags for word in (flag.name, *flag.values)),
        "refused": one.refusal,
        "findings": [finding._asdict() for finding in one.findings],
        "begins": begins._asdict() if begins and one.findings else None,
        "as_defined": [dependence.reason for dependence in one.verdict.dependences] if one.verdict else [],
        "explanations": [
            {"id": defect.id, "patch": defect.patch, "is_confirmed": confirmed}
            for defect, confirmed in one.explanations
        ],
        "controls": one.controls,
        "not_told_apart": [defect.id for defect in one.not_told_apart],
        "goes_away_with_all_patches": one.goes_away,
    }
