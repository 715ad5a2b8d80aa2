"""`audit`: every known defect of a Megatron, read from its sources; no flags, no GPU, and nothing of it is imported."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.padding import Padding
from rich.text import Text

from .. import __version__
from ..defects.catalog import known_defects
from ..defects.declare import Defect
from ..defects.probe import has_defect, locate
from ..megatrons.installed import describe_megatron
from ..reproductions.runner import has_program
from .against import read_path
from .console import make_console

LEVELS = {5: "error", 4: "error", 3: "warning", 2: "note", 1: "note"}  # of SARIF, by severity
COLUMNS = (
    "id", "severity", "kind", "effect", "when", "only_if", "instead", "patch", "flag", "not_removed_with", "state",
    "links", "introduced_by", "evidence",
)  # fmt: skip


def audit(against: str | None, as_json: bool, as_sarif: bool, fail_on: int | None) -> int:
    """Print the known defects of a Megatron; 1 if one is at least as severe as `fail_on`.

    Raises:
        PatchError, UsageError: as `read_path` does.
    """
    path = read_path(against)
    answers = {defect: has_defect(defect, path) for defect in known_defects()}
    defects = [defect for defect, answer in answers.items() if answer]
    hidden = [defect.id for defect, answer in answers.items() if answer is None]
    name = against or describe_megatron()
    if as_sarif:
        print(json.dumps(_make_sarif(defects, path), indent=1))
    elif as_json:
        rows = [{name: getattr(one, name) for name in COLUMNS} | _place(one, path) for one in defects]
        print(json.dumps({"megatron": name, "defects": rows, "hidden": hidden}, indent=1))
    else:
        _show(name, defects, hidden)
    return int(fail_on is not None and any(one.severity >= fail_on for one in defects))


def _place(defect: Defect, path: list[str] | None) -> dict[str, Any]:
    """Return the file and the line of the source that show it."""
    file, line = locate(defect, path)
    return {"file": str(file), "line": line}


def _show(name: str, defects: list[Defect], hidden: list[str]) -> None:
    console = make_console()
    console.print(name, soft_wrap=True)
    for one in defects:  # no table: narrow columns would cut ids and flags in two
        style = "red" if one.severity >= 4 else "yellow" if one.severity == 3 else ""
        sure = "`reproduce` shows it" if has_program(one.id) else one.evidence
        console.print(Text(f"* {one.id}, severity {one.severity} ({one.kind}; {sure}): {one.effect}", style))
        for text in (f"with: {one.condition}", f"way out: {_way_out(one)}"):
            console.print(Padding(Text(text, style), (0, 0, 0, 4), expand=False))
    removed = sum(bool(one.patch) for one in defects)
    console.print(
        f"{len(defects)} known defects; the patches remove {removed}. For those that affect a run:", soft_wrap=True
    )
    console.print("    megatron-mtp-patches doctor -- FLAGS")
    if hidden:
        console.print(f"This tree lacks the modules that would show {', '.join(hidden)}.", soft_wrap=True)


def _way_out(defect: Defect) -> str:
    """The patch that removes it, what to set instead, or the release that has not got it."""
    release = defect.state if defect.state.startswith("fixed") else "none known"
    return defect.ways_out("patch {}".format) or release


def _make_sarif(defects: Iterable[Defect], path: list[str] | None) -> dict[str, Any]:
    """The defects as SARIF 2.1.0, which code hosts show beside the source."""
    rules, results = [], []
    for one in defects:
        rules.append(
            {
                "id": one.id,
                "shortDescription": {"text": one.effect},
                "help": {"text": f"With {one.condition}. Way out: {_way_out(one)}. {' '.join(one.links)}"},
                "properties": {"severity": one.severity, "kind": one.kind, "evidence": one.evidence},
            }
        )
        place = _place(one, path)
        location = {"artifactLocation": {"uri": place["file"]}, "region": {"startLine": place["line"]}}
        results.append(
            {
                "ruleId": one.id,
                "level": LEVELS[one.severity],
                "message": {"text": f"{one.effect}. With {one.condition}."},
                "locations": [{"physicalLocation": location}],
            }
        )
    driver = {"name": "megatron-mtp-patches", "version": __version__, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
