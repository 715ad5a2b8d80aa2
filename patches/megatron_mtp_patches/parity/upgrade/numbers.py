"""The numbers of a small run in two Megatrons, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..comparison import Deviation, compare
from ..training import Printed, Record
from ..verdict import judge
from .small_run import SmallRunNumbers

Lines = list[dict[str, tuple[float | None, float | None]]]


class CutDefect(NamedTuple):
    """A known defect that affects a cut in one of the two, where no patch removes it.

    Attributes:
        id: of the defect.
        text: what it does, in a sentence without a full stop.
        has_it: "older" or "newer", the Megatron that has it.
    """

    id: str
    text: str
    has_it: str


class CutNumbers(NamedTuple):
    """The numbers of a cut.

    Attributes:
        name: of the cut.
        refusals: why it does not train in each of the two; '' where it does.
        lines: of each step the numbers of the log by name, each in the older Megatron and in the newer one, None where
            one does not log it; no steps where it does not train in both.
        deviations: what differs beyond the tolerance, step by step, the largest first.
        begins: the first hidden state that differs, or gradient of one; None where something else differs before.
        defects: those known ones that affect it in one of the two alone.
    """

    name: str
    refusals: tuple[str, str]
    lines: Lines
    deviations: list[Deviation]
    begins: Deviation | None
    defects: list[CutDefect]


class Functions(NamedTuple):
    """The functions of Megatron that ran on one rank: in both with another source, in the newer or older one alone."""

    changed: list[str]
    new: list[str]
    gone: list[str]


def compare_numbers(before: SmallRunNumbers, after: SmallRunNumbers) -> Iterator[CutNumbers]:
    """Yield the numbers of one rank, then those of each cut."""
    for name in dict.fromkeys((*before.records, *before.refusals, *after.records, *after.refusals)):
        defects = _compare_defects(before.defects.get(name, {}), after.defects.get(name, {}))
        if name not in before.records or name not in after.records:
            refusals = (before.refusals.get(name, ""), after.refusals.get(name, ""))
            yield CutNumbers(name, refusals, [], [], None, defects)
            continue
        ranks = before.records[name], after.records[name]
        assert before.tolerance is not None  # of the older Megatron, which has drawn the weights
        verdict = judge(compare(*ranks), before.tolerance)
        lines = _side_by_side(*(some[-1] for some in ranks))
        yield CutNumbers(name, ("", ""), lines, verdict.findings, verdict.begins, defects)


def _compare_defects(before: dict[str, str], after: dict[str, str]) -> list[CutDefect]:
    older = [CutDefect(one, text, "older") for one, text in before.items() if one not in after]
    return older + [CutDefect(one, text, "newer") for one, text in after.items() if one not in before]


def compare_functions(before: SmallRunNumbers, after: SmallRunNumbers) -> Functions:
    """Compare what ran on one rank."""
    old, new = before.functions, after.functions
    return Functions(
        changed=[name for name in new if name in old and new[name] != old[name]],
        new=[name for name in new if name not in old],
        gone=[name for name in old if name not in new],
    )


def _side_by_side(before: Record, after: Record) -> Lines:
    """The lines of the log, which the last rank prints."""
    return [
        {name: (_value(old, name), _value(new, name)) for name in dict.fromkeys((*old, *new))}
        for old, new in zip(before.lines, after.lines, strict=True)
    ]


def _value(line: dict[str, Printed], name: str) -> float | None:
    return line[name].value if name in line else None
