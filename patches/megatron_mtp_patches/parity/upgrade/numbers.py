"""The numbers of a small run in two Megatrons, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..comparison import Deviation, compare
from ..training import Printed, Record
from ..verdict import judge
from .small_run import SmallRunNumbers

Lines = list[dict[str, tuple[float | None, float | None]]]


class CutNumbers(NamedTuple):
    """The numbers of a cut.

    Attributes:
        name: of the cut.
        refusals: why it does not train in each of the two; '' where it does.
        lines: of each step the numbers of the log by name, each in the older Megatron and in the newer one, None where
            one does not log it; no steps where it does not train in both.
        deviations: what differs beyond the tolerance, step by step, the largest first.
        begins: the first hidden state that differs, or gradient of one; None where something else differs before.
    """

    name: str
    refusals: tuple[str, str]
    lines: Lines
    deviations: list[Deviation]
    begins: Deviation | None


class Functions(NamedTuple):
    """The functions of Megatron that ran on one rank: in both with another source, in the newer or older one alone."""

    changed: list[str]
    new: list[str]
    gone: list[str]


def compare_numbers(before: SmallRunNumbers, after: SmallRunNumbers) -> Iterator[CutNumbers]:
    """Yield the numbers of one rank, then those of each cut."""
    for name in dict.fromkeys((*before.records, *before.refusals, *after.records, *after.refusals)):
        if name not in before.records or name not in after.records:
            refusals = (before.refusals.get(name, ""), after.refusals.get(name, ""))
            yield CutNumbers(name, refusals, [], [], None)
            continue
        ranks = before.records[name], after.records[name]
        assert before.tolerance is not None  # of the older Megatron, which has drawn the weights
        verdict = judge(compare(*ranks), before.tolerance)
        lines = _side_by_side(*(some[-1] for some in ranks))
        yield CutNumbers(name, ("", ""), lines, verdict.findings, verdict.begins)


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
