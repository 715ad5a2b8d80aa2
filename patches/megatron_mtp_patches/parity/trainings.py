"""The trainings of one small run: of a cut, and of one rank with the spread of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

from ..doctor.findings import RunSettings
from .comparison import compare
from .flags import Flag, join
from .processes import Failed, run
from .training import FrameworkRun, Job, Record
from .verdict import STEP, Tolerance, Verdict, judge

DRAWS = 5  # of weights, until no small change of them makes a large change of the gradients
# Times the step, each in another direction: one direction may move a loss or a norm little by chance.
OTHERS = 1.25, 1.5
Flags = tuple[Flag, ...]


class TrainingError(Exception):
    """The run does not train on one rank; the message is its error."""


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
        script: the file that a user starts, or the run of a framework.
        flags: of the run on one rank.
        data: the kind of samples.

    Raises:
        TrainingError: it does not train.
    """

    def __init__(self, script: str | FrameworkRun, flags: Flags, data: str) -> None:
        self.script, self.data = script, data
        self.draw = 0  # which random weights
        self.reference = self._measure(flags)
        while not self.reference.tolerance.is_steady and self.draw + 1 < DRAWS:
            self.draw += 1
            self.reference = self._measure(flags)
        tolerance = self.reference.tolerance
        is_fine = tolerance.is_steady and tolerance.dtype == "fp32"  # a cut deviates less than the step, by far
        for factor in () if is_fine else OTHERS:
            moved = self.train(flags, 1, step=factor * STEP[tolerance.dtype])
            if not isinstance(moved, Failed):
                tolerance.widen(compare([self.reference.record], moved))
        self._others: dict[tuple[Flags, str | None], list[Record] | Failed] = {}

    def _measure(self, flags: Flags) -> Reference:
        dtype = "bf16" if Flag("--bf16") in flags else "fp32"
        records, moved = self.train(flags, 1), self.train(flags, 1, step=STEP[dtype])
        for one in (records, moved):
            if isinstance(one, Failed):
                raise TrainingError(one.error)
        return Reference(records[0], Tolerance(compare(records, moved), dtype))  # type: ignore[arg-type]

    def other_reference(self, flags: Flags, patches: str | None) -> Reference | Failed:
        """The run on one rank with other flags or patches, and the same tolerance; trained once."""
        key = flags, patches
        if key not in self._others:
            self._others[key] = self.train(flags, 1, patches)
        records = self._others[key]
        return records if isinstance(records, Failed) else Reference(records[0], self.reference.tolerance)

    def train(self, flags: Flags, ranks: int, patches: str | None = None, step: float = 0.0) -> list[Record] | Failed:
        """Train on so many ranks, with `patches` in place of those of this process."""
        return run(Job(self.script, join(flags), ranks, self.data, self.draw, step, patches))


def judge_cut(reference: Reference, records: Sequence[Record]) -> Verdict:
    settings = RunSettings([SimpleNamespace(**records[0].arguments)], None)
    return judge(compare([reference.record], list(records)), reference.tolerance, settings)
