"""The scores that are kept, and how many rows came out as wanted."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from scripts.common.kept_rows import read_rows, write_rows
from scripts.common.markdown import table

from .listed import FOLDER, LISTS, read_faults

SCORES = FOLDER / "scores.json"


class Score(NamedTuple):
    """What came of a row on a release.

    Attributes:
        list: one of LISTS.
        release: of Megatron.
        name: of the layout, defect or fault.
        outcome: of a defect or a fault "caught" by the relation and within the steps of its row; "caught otherwise" by
            another relation, or later; a "false alarm" before the step of a fault; or "silent". Of a run with all
            patches and no fault "clean" or "not clean"; the latter is right for a defect without a patch; or "other
            bits" than without a watch. "not trained" where it ends in an error, or nowhere has what the fault changes.
        listed: the outcome that the row wants.
        found: the findings of the log, in its order.
        said: what else the watch has logged: what it compares, and what it cannot.
        error: with which it ends.
        seconds: that it took.
    """

    list: str
    release: str
    name: str
    outcome: str
    listed: str
    found: list[str]
    said: list[str]
    error: str
    seconds: int


def read_scores(file: Path = SCORES) -> list[Score]:
    return [Score(**one) for one in read_rows(file)]


def write_scores(scores: list[Score], file: Path = SCORES) -> None:
    """Write the last score of each row, by list and release."""
    last = {(one.list, one.release, one.name): one for one in scores}
    write_rows(sorted(last.values(), key=lambda one: (LISTS.index(one.list), one.release)), file)


def make_table(scores: list[Score]) -> list[str]:
    """How many rows of each list came out as it wants, by release, and each other row."""
    releases = sorted({one.release for one in scores})
    rows = [[release, *(_count(scores, name, release) for name in LISTS)] for release in releases]
    others = [one for one in scores if one.outcome != one.listed]
    lines = [f"* {one.release}, {one.list}, {one.name}: {one.outcome}: {_say(one)}" for one in others]
    return [*table(["release", *LISTS], rows), "", *lines]


def make_table_of_flips(scores: list[Score]) -> list[str]:
    """How many of the faults that flip a bit were caught, by what has it and by the relation that sees it."""
    outcomes: dict[str, list[str]] = {}
    for score in scores:
        if score.list == "faults":
            outcomes.setdefault(score.name, []).append(score.outcome)
    groups: dict[tuple[str, str], list[str]] = {}
    for fault in read_faults():
        if "flip" in fault["change"]:
            group = (fault["where"], fault.get("relation", "none"))
            groups.setdefault(group, []).extend(outcomes.get(fault["name"], []))
    rows = [[*group, str(len(all_)), str(all_.count("caught"))] for group, all_ in sorted(groups.items())]
    return table(["a bit of a", "relation", "runs", "caught in the next check"], rows)


def _count(scores: list[Score], name: str, release: str) -> str:
    chosen = [one for one in scores if (one.list, one.release) == (name, release)]
    return f"{sum(one.outcome == one.listed for one in chosen)} of {len(chosen)}" if chosen else "not run"


def _say(score: Score) -> str:
    return score.error or (score.found[0] if score.found else f"not {score.listed}")
