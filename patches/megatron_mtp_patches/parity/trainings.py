"""The trainings of one small run: of a cut, and of one rank with the spread of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

from ..doctor.findings import RunSettings
from .comparison import compare
from .flags import Flag, join
from .processes import Failed, run
from .training import Job, Record
from .verdict import STEP, Tolerance, Verdict, judge

DRAWS = 5  # of weights, until no small change of them makes a large change of the gradients
Flags = tuple[Flag, ...]


class Reference(NamedTuple):
    """The run on one rank.

    Attributes:
        record: of its rank.
        tolerance: how far the numbers of a cut may deviate from it.
    """

    record: Record
    tolerance: Tolerance


class Trainings:
    """Trains with the same script, samples and random weights.

    Args:
        script: the file that a user starts.
        data: the kind of samples.
    """

    def __init__(self, script: str, data: str) -> None:
        self.script, self.data = script, data
        self.draw = 0  # which random weights
        self._references: dict[tuple[Flags, str | None], Reference | Failed] = {}

    def choose_weights(self, flags: Flags) -> Reference | Failed:
        """Train on one rank, again with other weights as long as its numbers are not steady."""
        reference = self.reference(flags)
        while isinstance(reference, Reference) and not reference.tolerance.is_steady and self.draw + 1 < DRAWS:
            self.draw += 1
            self._references.clear()
            reference = self.reference(flags)
        return reference

    def reference(self, flags: Flags, patches: str | None = None) -> Reference | Failed:
        """Train on one rank, once with these flags and patches."""
        key = flags, patches
        if key not in self._references:
            self._references[key] = self._measure(flags, patches)
        return self._references[key]

    def _measure(self, flags: Flags, patches: str | None) -> Reference | Failed:
        records, moved = self.cut(flags, 1, patches), self.cut(flags, 1, patches, STEP)
        if isinstance(records, Failed) or isinstance(moved, Failed):
            return records if isinstance(records, Failed) else moved  # type: ignore[return-value]
        return Reference(records[0], Tolerance(compare(records, moved)))

    def cut(self, flags: Flags, ranks: int, patches: str | None = None, step: float = 0.0) -> list[Record] | Failed:
        """Train on so many ranks, with `patches` in place of those of this process."""
        return run(Job(self.script, join(flags), ranks, self.data, self.draw, step, patches))


def judge_cut(reference: Reference, records: Sequence[Record]) -> Verdict:
    settings = RunSettings([SimpleNamespace(**records[0].arguments)], None)
    return judge(compare([reference.record], list(records)), reference.tolerance, settings)
