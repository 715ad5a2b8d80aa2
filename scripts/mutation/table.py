"""What became of each mutant, as JSON and as Markdown."""

from __future__ import annotations

import json
from pathlib import Path

import markdown_pages

SURVIVED = "SURVIVED"


def read(file: Path) -> dict[str, dict]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write(folder: Path, rows: dict[str, dict]) -> None:
    """`rows`: {mutant: {where, killed, release, stage, reason}}"""
    (folder / "mutants.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Mutants",
        "",
        "Written by `scripts/mutate.py`. Each row is the code with one thing changed, and the first test that failed.",
        "",
    ]
    edits = {name: row for name, row in rows.items() if row["kind"] == "edit"}
    for title, part in (("Edits left out", edits), ("Comparisons turned round", _rest(rows, edits))):
        killed = sum(row["killed"] is not None for row in part.values())
        lines += [f"## {title}: {len(part)}, {killed} killed", ""]
        cells = (_cells(name, row) for name, row in part.items())
        lines += [*markdown_pages.table(["mutant", "of", "killed by", "on"], cells), ""]
    (folder / "mutants.md").write_text("\n".join(lines), encoding="utf-8")


def _rest(rows: dict[str, dict], edits: dict[str, dict]) -> dict[str, dict]:
    return {name: row for name, row in rows.items() if name not in edits}


def _cells(name: str, row: dict) -> list[str]:
    if row["killed"] is None:
        fate = f"equivalent: {row['reason']}" if row["reason"] else SURVIVED
        return [f"`{_short(name)}`", row["where"], fate, ", ".join(row["tried"])]
    test = row["killed"].partition(" - ")[0].removeprefix("tests/")
    return [f"`{_short(name)}`", row["where"], f"`{_short(test)}`", row["release"]]


def _short(text: str) -> str:
    return text.replace("megatron.core.", "core.").replace("megatron_overrides.core.", "core.")
