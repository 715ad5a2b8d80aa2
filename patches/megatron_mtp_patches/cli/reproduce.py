"""`reproduce ID`: show a known defect on the CPU of this machine, as Megatron is and with the patches."""

from __future__ import annotations

import json
from typing import Any

from ..defects.catalog import known_defects
from ..defects.declare import Defect
from ..defects.probe import has_defect
from ..engine import PatchError, UsageError
from ..engine.source import find_file
from ..installed_megatron import describe_megatron
from ..reproductions import runner
from .console import make_console


def reproduce(identifier: str | None, as_json: bool) -> int:
    """Print what the program of one defect, or of each (None), expects and sees; 1 if the patches leave one wrong.

    Raises:
        UsageError: there is no such defect, or a CPU cannot show it.
        PatchError: there is no Megatron, or no rehearsal with this torch.
    """
    chosen = [defect for defect in known_defects() if identifier in (None, defect.id)]
    programs = {defect: program for defect in chosen if (program := runner.find_program(defect.id))}
    if not chosen:
        raise UsageError(f"{identifier!r} is not the id of a known defect; `megatron-mtp-patches audit` lists them")
    if not programs:
        raise UsageError(f"there is no program for {identifier}: a CPU cannot show it, or nobody has written one")
    if find_file("megatron.core") is None:
        raise PatchError(describe_megatron())
    runner.prepare()
    reports = [_report(defect, program) for defect, program in programs.items()]
    if as_json:
        print(json.dumps(reports, indent=1, default=str))
    else:
        _show(reports)
    return int(any(report["patch"] and not report["with the patches"]["right"] for report in reports))


def _report(defect: Defect, program: Any) -> dict[str, Any]:
    as_it_is, patched = (runner.run(program, with_patches) for with_patches in (False, True))
    return {
        "id": defect.id,
        "effect": defect.effect,
        "program": (program.__doc__ or "").strip(),
        "ranks": getattr(program, "RANKS", 1),
        "has defect": has_defect(defect),
        "patch": defect.patch,
        "expected": as_it_is.expected,
        "as it is": {"seen": as_it_is.seen, "right": as_it_is.is_right},
        "with the patches": {"seen": patched.seen, "right": patched.is_right},
    }


def _show(reports: list[dict[str, Any]]) -> None:
    console = make_console()

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    say(describe_megatron())
    for report in reports:
        say(f"\n{report['id']}: {report['effect']}", "bold")
        say(f"{report['program']} ({report['ranks']} rank{'s' * (report['ranks'] > 1)})")
        say(f"    expected          {report['expected']}")
        for name in ("as it is", "with the patches"):
            outcome = report[name]
            say(f"    {name:<17} {outcome['seen']}", "green" if outcome["right"] else "red")
        if report["has defect"] is False:
            say("    The source of this Megatron does not have the defect.")
        elif not report["patch"]:
            say("    No patch removes it.")
