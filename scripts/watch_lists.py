"""What ci/watch says a watch has to see: runs with a known defect, and planted faults."""

from __future__ import annotations

from typing import Any

from scripts.common.process import ROOT
from scripts.common.toml import read_toml

FOLDER = ROOT / "ci" / "watch"
RELATIONS = ("copies", "cast", "moves", "norm", "batch", "finite")
MOST_RANKS = 4


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
