"""The rows of ci/parity/known.toml and of ci/parity/mutants.toml for a release."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from scripts.common.process import ROOT
from scripts.common.toml import read_toml

FOLDER = ROOT / "ci" / "parity"
LISTS = {"known": ("case",), "mutants": ("mutant", "reserve")}
MUTATED = ("0.18.2", "0.19.2")  # the releases on which all mutants are


def read_rows(name: str, release: str, only: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The rows of a list that are on a release, with its values, or those named. Ends this process where one is not."""
    parts = read_toml(FOLDER / f"{name}.toml")
    kinds = LISTS[name] if only else LISTS[name][:1]
    rows = [choose(row, release) for kind in kinds for row in parts[kind] if release in row.get("releases", MUTATED)]
    if unknown := sorted(set(only or ()) - {row["name"] for row in rows}):
        sys.exit(f"not in ci/parity/{name}.toml for {release}: {', '.join(unknown)}")
    return [row for row in rows if not only or row["name"] in only]


def choose(row: dict[str, Any], release: str) -> dict[str, Any]:
    """A row with the values of a release, where a value is a table of releases; the name of a case is its defect."""
    chosen = {key: value.get(release, "") if isinstance(value, dict) else value for key, value in row.items()}
    return {"name": row.get("defect"), **chosen}
