"""What came of a row of one of the lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron_overrides.watch.relations import RELATIONS

_LINE = re.compile(r"watch, step (?P<step>\d+): (?P<text>(?P<kind>[^:]+).*)")


class Found(NamedTuple):
    """A finding of the log: its step from 1, its relation, and the line after the step."""

    step: int
    relation: str
    text: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.text}"


def read_findings(messages: Iterable[str]) -> list[Found]:
    """The findings among the messages of a log."""
    matches = filter(None, map(_LINE.match, messages))
    return [Found(int(one["step"]), RELATIONS.get(one["kind"], one["kind"]), one["text"]) for one in matches]


def describe(row: dict[str, Any], found: list[Found]) -> str:
    """The outcome of a run with these findings (see table.Score)."""
    if "relation" not in row and "not_seen" not in row:
        return "not clean" if found else "clean"
    if any(one.step < row["step"] for one in found) and "where" in row:
        return "false alarm"
    if any(one.relation == row.get("relation") and one.step in due_steps(row) for one in found):
        return "caught"
    return "caught otherwise" if found else "silent"


def due_steps(row: dict[str, Any]) -> range:
    """The steps in which its relation has to report a defect, or a fault: their checks are made before an update.

    That of what moves is made after it.
    """
    is_after = row.get("at") == "update" or row.get("at") == "during update" and row["relation"] != "moves"
    first = row["step"] + is_after
    return range(first, first + row.get("within", 1))
