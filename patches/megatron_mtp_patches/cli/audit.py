"""`audit`: every known defect of a Megatron, read from its sources; no flags, no GPU, and nothing of it is imported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.text import Text

from .. import __version__
from ..defects.catalog import known_defects
from ..defects.declare import Defect
from ..defects.probe import has_defect, locate
from ..defects.runner import has_program
from ..engine import PatchError, UsageError
from ..engine.source import find_file
from ..megatrons.installed import describe_megatron
from .console import make_console

LEVELS = {5: "error", 4: "error", 3: "warning", 2: "note", 1: "note"}  # of SARIF, by severity


@dataclass(frozen=True)
class Row:
    """A defect that a Megatron has.

    Attributes:
        file, line: where its source shows it.
    """

    id: str
    severity: int
    kind: str
    effect: str
    when: str
    only_if: str
    instead: str
    patch: str
    flag: str
    not_removed_with: str
    state: str
    links: tuple[str, ...]
    introduced_by: tuple[str, ...]
    evidence: str
    file: str
    line: int


def audit(against: str | None, as_json: bool, as_sarif: bool, fail_on: int | None) -> int:
    """Print the known defects of a Megatron; 1 if one is at least as severe as `fail_on`.

    `against` reads a checkout or site-packages, or several joined as in PATH; None what is installed.

    Raises:
        PatchError: there is no Megatron.
        UsageError: `against` names no folder, or none with a Megatron.
    """
    path = against.split(os.pathsep) if against else None
    for folder in path or ():
        if not Path(folder).is_dir():
            raise UsageError(f"--against {against}: there is no folder {folder!r}")
    if find_file("megatron.core", path) is None:
        if path:
            raise UsageError(f"--against {against}: there is no megatron/core in it")
        raise PatchError(describe_megatron())
    answers = {defect: has_defect(defect, path) for defect in known_defects()}
    rows = [_describe(defect, path) for defect, answer in answers.items() if answer]
    hidden = [defect.id for defect, answer in answers.items() if answer is None]
    name = against or describe_megatron()
    if as_sarif:
        print(json.dumps(make_sarif(rows), indent=1))
    elif as_json:
        print(json.dumps({"megatron": name, "defects": [asdict(row) for row in rows], "hidden": hidden}, indent=1))
    else:
        _show(name, rows, hidden)
    return int(fail_on is not None and any(row.severity >= fail_on for row in rows))


def _describe(defect: Defect, path: list[str] | None) -> Row:
    file, line = locate(defect, path)
    values = {name: getattr(defect, name) for name in Row.__dataclass_fields__ if name not in ("file", "line")}
    return Row(**values, file=str(file), line=line)


def _show(name: str, rows: list[Row], hidden: list[str]) -> None:
    console = make_console()
    console.print(name, soft_wrap=True)
    for row in rows:  # no table: narrow columns would cut ids and flags in two
        style = "red" if row.severity >= 4 else "yellow" if row.severity == 3 else ""
        sure = "`reproduce` shows it" if has_program(row.id) else row.evidence
        console.print(Text(f"* {row.id}, severity {row.severity} ({row.kind}; {sure}): {row.effect}", style))
        for text in (f"with: {condition_of(row)}", f"way out: {way_out(row)}"):
            console.print(Padding(Text(text, style), (0, 0, 0, 4), expand=False))
    removed = sum(bool(row.patch) for row in rows)
    console.print(
        f"{len(rows)} known defects; the patches remove {removed}. For those that affect a run:", soft_wrap=True
    )
    console.print("    megatron-mtp-patches doctor -- FLAGS")
    if hidden:
        console.print(f"This tree lacks the modules that would show {', '.join(hidden)}.", soft_wrap=True)


def condition_of(defect: Row | Defect) -> str:
    """The flags, and what flags cannot tell."""
    return f"{defect.when}, if {defect.only_if}" if defect.only_if else defect.when


def way_out(defect: Row | Defect) -> str:
    """The patch that removes it, what to set instead, or the release that has not got it."""
    ways = [f"patch {defect.patch}{range_of_patch(defect)}"] if defect.patch else []
    ways += [defect.instead] if defect.instead else []
    return "; or ".join(ways) or (defect.state if defect.state.startswith("fixed") else "none known")


def range_of_patch(defect: Row | Defect) -> str:
    """The setting that the patch needs, and the flags with which it does not remove the defect; '' for neither."""
    needed = f" with {defect.flag}" if defect.flag else ""
    return needed + (f", but not with {defect.not_removed_with}" if defect.not_removed_with else "")


def make_sarif(rows: Iterable[Row]) -> dict[str, Any]:
    """The rows as SARIF 2.1.0, which code hosts show beside the source."""
    rules, results = [], []
    for row in rows:
        rules.append(
            {
                "id": row.id,
                "shortDescription": {"text": row.effect},
                "help": {"text": f"With {condition_of(row)}. Way out: {way_out(row)}. {' '.join(row.links)}"},
                "properties": {"severity": row.severity, "kind": row.kind, "evidence": row.evidence},
            }
        )
        location = {"artifactLocation": {"uri": row.file}, "region": {"startLine": row.line}}
        results.append(
            {
                "ruleId": row.id,
                "level": LEVELS[row.severity],
                "message": {"text": f"{row.effect}. With {condition_of(row)}."},
                "locations": [{"physicalLocation": location}],
            }
        )
    driver = {"name": "megatron-mtp-patches", "version": __version__, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
