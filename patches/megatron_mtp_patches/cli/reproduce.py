"""`reproduce ID`: show a known defect on the CPU of this machine, as Megatron is and with all patches; or write its
program into a file of its own.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from ..catalog import CATALOG
from ..defects.catalog import known_defects, releases_with, removed_by
from ..defects.declare import Defect, address_of
from ..defects.probe import has_defect
from ..engine import PatchError, UsageError
from ..engine.similar_names import did_you_mean
from ..engine.source import find_file
from ..megatrons.installed import describe_megatron, find_releases
from ..reproductions import needs, runner
from ..reproductions.standalone import make_standalone, needs_gpus
from . import CANNOT_RUN
from .console import make_printer

WIDTH = 100  # of the text in a standalone file
_EVIDENCE = {
    "reproduced": "reproduced by hand",
    "read": "read in Megatron's source",
    "reported": "reported by others",
}


def reproduce(identifier: str | None, as_json: bool) -> int:
    """Print what the program of one defect, or of each (None), expects and sees.

    Returns 1 if the patches leave a defect, else 125 if a program cannot run because a package is missing, else 0.

    Raises:
        UsageError: there is no such defect, or a CPU cannot show it.
        PatchError: there is no Megatron, or no rehearsal with this torch.
    """
    if find_file("megatron.core") is None:
        raise PatchError(describe_megatron())
    programs = find_programs(identifier)
    missing = {defect: needs.find_missing(program) for defect, program in programs.items()}
    if not all(missing.values()):
        runner.prepare()
    reports = [run_both(defect, program, missing[defect]) for defect, program in programs.items()]
    if as_json:
        print(json.dumps(reports, indent=1, default=str))
    else:
        _show(reports)
    ran = [report for report in reports if not report["cannot run"]]
    if any(report["patch"] and not report["with the patches"]["right"] for report in ran):
        return 1
    return 0 if len(ran) == len(reports) else CANNOT_RUN


def write_standalone(identifier: str, file: Path) -> int:
    """Write the program of a defect into a file that needs nothing of this package.

    Raises:
        UsageError: there is no such defect or no program for it, or the file cannot be written.
        PatchError: there is no Megatron.
    """
    try:
        if find_file("megatron.core") is None:  # the programs import torch
            raise PatchError(describe_megatron())
        if file.is_dir():
            raise UsageError(f"{file} is a folder: give the name of a file")
        if file.exists():
            raise UsageError(f"{file} exists already: remove it, or choose another name")
        if not file.parent.is_dir():
            raise UsageError(f"there is no folder {file.parent}: create it, or choose another one")
        ((defect, program),) = find_programs(identifier).items()
        file.write_text(standalone_text(defect, program), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error
    print(f"{file} shows {defect.id}: its first lines say what it needs. Run it before you post it.")
    if has_defect(defect) is False:
        print("The source of this Megatron does not have the defect.")
    return 0


def standalone_text(defect: Defect, program: ModuleType) -> str:
    """The text of a file that shows the defect, and that needs nothing of this package.

    Its first lines say what the defect is, which Megatrons have it, and how the file is run.
    """
    releases, megatron = ", ".join(releases_with(defect)), " or ".join(sorted(find_releases()))
    assumed = needs.assumption_of(program)
    upstream = f" Upstream: {defect.describe_upstream(address_of)}." if defect.links else ""
    paragraphs = [
        f"{defect.effect}. It affects runs with {defect.condition}.",
        f"The program: {' '.join((program.__doc__ or '').split())}",
        *([f"It has not been shown with the real kernel: it assumes that {assumed}."] if assumed else []),
        "It prints what is expected and what is seen, and ends with 1 where they differ, with 125 where it cannot run.",
        describe_machine(program),
        "    python FILE",
        f"Megatron with this defect: {releases}.{upstream}",
        f"megatron-mtp-patches, which calls the defect {defect.id}, has made this file"
        f"{f', with megatron-core {megatron}' if megatron else ''}.",
    ]
    head = "\n\n".join(textwrap.fill(text, WIDTH, break_on_hyphens=False) for text in paragraphs)
    return make_standalone(program, head)


def describe_machine(program: ModuleType) -> str:
    """Say what a file of the program needs."""
    ranks = getattr(program, "RANKS", 1)
    gpus = f"{ranks} GPU{'s' * (ranks > 1)}"
    packages = " and ".join(needs.needs_of(program))
    machine = (
        f"It needs {gpus}, and has not been run on GPUs."
        if needs_gpus(program)
        else f"It runs on {gpus}, or on a CPU where there are fewer."
    )
    return machine + (f" It also needs {packages}." if packages else "")


def find_programs(identifier: str | None) -> dict[Defect, ModuleType]:
    chosen = [defect for defect in known_defects() if identifier in (None, defect.id)]
    programs = {defect: program for defect in chosen if (program := runner.find_program(defect.id))}
    if not chosen:
        if patch := next((patch for patch in CATALOG if patch.id == identifier), None):
            shown = [defect.id for defect in removed_by(patch) if runner.has_program(defect.id)]
            ids = (
                f"give the id of a defect that it removes: {', '.join(shown)}" if shown else "no program shows its work"
            )
            raise UsageError(f"{identifier} is a patch; {ids}")
        hint = did_you_mean(str(identifier), (defect.id for defect in known_defects()))
        raise UsageError(
            f"{identifier!r} is not the id of a known defect{hint}; `megatron-mtp-patches audit` lists them"
        )
    if not programs:
        (defect,) = chosen
        raise UsageError(
            f"there is no program for {identifier}: a CPU cannot show it, or none is written yet. It was "
            f"{_EVIDENCE[defect.evidence]}: {defect.effect}"
        )
    return programs


def run_both(defect: Defect, program: ModuleType, missing: str) -> dict[str, Any]:
    """Run the program without and with the patches, and return what was seen; nothing where packages are `missing`."""
    about = {
        "id": defect.id,
        "effect": defect.effect,
        "program": (program.__doc__ or "").strip(),
        "ranks": getattr(program, "RANKS", 1),
        "has defect": has_defect(defect),
        "patch": defect.patch,
        "cannot run": missing,
    }
    if missing:
        return about
    as_it_is, patched = (runner.run(program, patches) for patches in ("none", "all"))
    return about | {
        "expected": as_it_is.expected,
        "as it is": {"seen": as_it_is.seen, "right": as_it_is.is_right},
        "with the patches": {"seen": patched.seen, "right": patched.is_right},
    }


def _show(reports: list[dict[str, Any]]) -> None:
    show = make_printer()
    show(describe_megatron())
    for report in reports:
        show(f"\n{report['id']}: {report['effect']}", "bold")
        show(f"{report['program']} ({report['ranks']} rank{'s' * (report['ranks'] > 1)})")
        if report["cannot run"]:
            show(f"    cannot run here: {report['cannot run']}", "yellow")
            continue
        show(f"    expected          {report['expected']}")
        for name in ("as it is", "with the patches"):
            outcome = report[name]
            show(f"    {name:<17} {outcome['seen']}", "green" if outcome["right"] else "red")
        if report["has defect"] is False:
            show("    The source of this Megatron does not have the defect.")
        elif not report["patch"]:
            show("    No patch removes it.")
