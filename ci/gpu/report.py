"""What the stages found, as JSON, as Markdown and in docs/gpu.md; ratios first."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/bench"))

import markdown_pages
from figures import NOT_RUN
from tables import Table


def tables(report: dict[str, Any]) -> list[Table]:
    found = [(stage["stage"], figure) for stage in report["stages"] for figure in stage["figures"]]
    found.sort(key=lambda pair: " / " not in pair[1]["what"])
    figures = [
        [figure["what"], stage, figure["value"], figure["target"] or "-", _verdict(figure)] for stage, figure in found
    ]
    stages = [
        [stage["stage"], stage["state"], f"{stage['seconds']:.0f}" if stage["seconds"] else "", stage["reason"]]
        for stage in report["stages"]
    ]
    return [
        Table("Against the targets", ["figure", "stage", "found", "target", "met"], figures),
        Table("Stages", ["stage", "state", "seconds", "why"], stages),
    ]


def _verdict(figure: dict[str, Any]) -> str:
    return {None: NOT_RUN, True: "yes", False: "no"}[figure["met"]] if figure["target"] else "-"


def lines(report: dict[str, Any]) -> list[str]:
    made = [f"Machine: {report['machine']}.", ""]
    for release, versions in report["environments"].items():
        made.append(f"* {release}: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    for table in tables(report):
        made += ["", *table.markdown()]
    return [line for line, before in zip(made, [None, *made], strict=False) if line or before]


def write(report: dict[str, Any], folder: Path, doc: Path | None) -> None:
    """report.json and report.md in `folder`; the same tables in the block `results` of `doc`."""
    text = "\n".join(lines(report)).rstrip() + "\n"
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(f"# GPU lane\n\n{text}", encoding="utf-8")
    if doc:
        page = doc.read_text(encoding="utf-8")
        doc.write_text(markdown_pages.fill(page, {"results": text}), encoding="utf-8")
