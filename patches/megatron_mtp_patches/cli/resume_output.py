"""What `parity --resume` prints, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..parity.resume import Resume
from .parity_output import SHOWN, describe_patches, show_dependences

Show = Callable[..., None]


def show_resume(show: Show, resume: Resume) -> None:
    layout = "resumed on the same ranks" if resume.is_same_layout else f"resumed on {resume.loaded.name}"
    head = f"saved on {resume.saved.name}, {layout} ({resume.seconds:.1f} s)"
    if resume.refusal:
        show(f"{head}: is refused: {resume.refusal}", style="yellow")
    elif not resume.deviations:
        extent = ", but for what Megatron defines by layout" if resume.dependences else ""
        show(f"{head}: goes on as the run that was not interrupted{extent}", style="green")
    else:
        show(f"{head}: {len(resume.deviations)} quantities are not those of the run that went on", style="bold red")
    for one in resume.deviations[:SHOWN]:
        show(f"    {one}")
    show_dependences(show, resume.dependences)
    for defect in resume.explanations:
        show(f"    known: {defect.id}: {defect.text} ({f'patch {defect.patch}' if defect.patch else defect.remedy})")
    if resume.deviations and not resume.explanations:
        show("    no known defect explains it")
    if resume.goes_away is not None:
        still = "still differs" if resume.deviations else "is still refused, or differs"
        show(f"    with all patches it {'is equal' if resume.goes_away else still}")


def show_summary_of_resumes(show: Show, resumes: list[Resume], seconds: float) -> None:
    refused = [one for one in resumes if one.refusal]
    differing = [one for one in resumes if one.deviations]
    equal = len(resumes) - len(refused) - len(differing)
    parts = [f"{equal} of {len(resumes)} resumes go on as the run that was not interrupted, {describe_patches()}"]
    for name, several in (("these differ", differing), ("these are refused", refused)):
        if several:
            parts.append(f"{name}: {', '.join(f'{one.saved.name} -> {one.loaded.name}' for one in several)}")
    show(f"\n{'; '.join(parts)} ({seconds:.0f} s)")


def describe_resume(one: Resume) -> dict[str, Any]:
    return {
        "saved": one.saved.name,
        "loaded": one.loaded.name,
        "refused": one.refusal,
        "deviations": list(map(str, one.deviations)),
        "as_defined": [dependence.reason for dependence in one.dependences],
        "explanations": [asdict(defect) for defect in one.explanations],
        "goes_away": one.goes_away,
    }
