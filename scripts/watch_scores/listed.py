"""What ci/watch says a watch has to see: known defects and planted faults; and runs in which all is well."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from scripts.common.process import ROOT
from scripts.common.toml import read_toml
from scripts.parity_scores.listed import read_rows as read_parity_rows

FOLDER = ROOT / "ci" / "watch"
RELATIONS = ("copies", "cast", "moves", "norm", "batch", "finite")
MOST_RANKS = 4
_OF_RUNS = ("name", "releases", "ranks", "flags", "frozen", "resumes", "weights", "is_unrepaired")
LISTS = ("clean", "defects", "faults")


def read_defects() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The cases, and the rows of the defects that are not seen."""
    parts = read_toml(FOLDER / "defects.toml")
    return parts["case"], parts["not_seen"]


def read_faults() -> list[dict[str, Any]]:
    """The faults, each with its layout in the place of its name.

    Raises:
        KeyError: there is no such layout.
    """
    parts = read_toml(FOLDER / "faults.toml")
    layouts = {layout["name"]: layout for layout in parts["layout"]}
    return [{**fault, "layout": layouts[fault["layout"]]} for fault in parts["fault"]]


def read_clean(release: str) -> list[dict[str, Any]]:
    """The layouts of the faults, the known wrong numbers that `parity` is scored by, and the other known defects."""
    parity_runs = [{**row, "releases": [release]} for row in read_parity_rows("known", release)]
    named = {row["name"] for row in parity_runs}
    others = [{**case, "name": case["defect"]} for case in read_defects()[0] if case["defect"] not in named]
    layouts = read_toml(FOLDER / "faults.toml")["layout"]
    unrepaired = dict.fromkeys(read_toml(FOLDER / "defects.toml")["unrepaired"], {"is_unrepaired": True})
    rows = [row | unrepaired.get(row["name"], {}) for row in (*layouts, *parity_runs, *others)]
    return [{key: row[key] for key in _OF_RUNS if key in row} for row in rows]


def read_rows(name: str, release: str, only: Collection[str] | None = None) -> list[dict[str, Any]]:
    """The runs of a list that are on a release, or those named, or of a layout that is named.

    Returns:
        Rows with name, ranks, flags and releases. Those of faults also have what their layout has; those of "clean"
        have no relation that should report. Ends this process where nothing has a name.
    """
    if name == "faults":
        rows = [{**fault["layout"], **fault, "layout": fault["layout"]["name"]} for fault in read_faults()]
    elif name == "defects":
        rows = [{**case, "name": case["defect"]} for case in read_defects()[0]]
    else:
        rows = read_clean(release)
    rows = [row for row in rows if release in row["releases"]]
    if unknown := sorted(set(only or ()) - {row["name"] for row in rows} - {row.get("layout", "") for row in rows}):
        sys.exit(f"no row of {name} on {release}: {', '.join(unknown)}")
    return [row for row in rows if not only or {row["name"], row.get("layout")} & set(only)]
