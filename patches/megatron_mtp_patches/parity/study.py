"""Compares all cuts of a run with the run on one rank, and says what each deviation is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

from ..doctor.findings import Finding, RunSettings
from ..engine import UsageError
from .comparison import Deviation, compare
from .cuts import Cut, list_cuts, reference
from .explanations import known_explanations
from .flags import join
from .processes import Failed, run
from .small import SmallRun
from .training import Job, Record
from .verdict import STEP, Tolerance, Verdict, judge

DRAWS = 5  # of weights, until no small change of them makes a large change of the gradients


class Explanation(NamedTuple):
    """A known defect that acts in a cut with findings.

    Attributes:
        defect: what `doctor` says of it.
        is_confirmed: whether the findings go away with its patch alone; None where that cannot be tried.
    """

    defect: Finding
    is_confirmed: bool | None


@dataclass
class Result:
    """What came of a cut.

    Attributes:
        cut: its layout.
        seconds: that it took.
        refusal: the error with which Megatron refused the cut; '' where it trained.
        verdict: what deviates; None where it was refused.
        goes_away: whether all findings go away with all patches applied; None where they are, or nothing was found.
        explanations: the known defects whose patch alone makes it equal; where there is none, all that act in it, those
            that do not act in the reference first.
    """

    cut: Cut
    seconds: float
    refusal: str = ""
    verdict: Verdict | None = None
    goes_away: bool | None = None
    explanations: list[Explanation] = field(default_factory=list)

    @property
    def findings(self) -> list[Deviation]:
        return self.verdict.findings if self.verdict else []


class Study:
    """The comparisons of one small run.

    Args:
        script: the file that a user starts.
        small: its run.
        data: the kind of samples.
        all_are_applied: every patch is applied in this process, so that no other choice removes more.

    Raises:
        UsageError: Megatron refuses the run on one rank, or it fails.
    """

    def __init__(self, script: str, small: SmallRun, data: str, all_are_applied: bool) -> None:
        self.script, self.small, self.data, self.all_are_applied = script, small, data, all_are_applied
        self.draw = 0  # which random weights
        self.records, self.tolerance = self._measure_reference(None)
        while not self.tolerance.is_steady and self.draw + 1 < DRAWS:
            self.draw += 1
            self.records, self.tolerance = self._measure_reference(None)

    @property
    def notes(self) -> list[str]:
        """What weakens the comparisons, as sentences without a full stop."""
        unplaced = self.records[0].unplaced
        unsteady = "each draw of weights has routes that a small change moves, so large deviations pass"
        notes = [f"not compared, because sharded_state_dict has no place for them: {', '.join(unplaced)}"]
        return notes * bool(unplaced) + [unsteady] * (not self.tolerance.is_steady)

    def results(self, most_ranks: int) -> Iterator[Result]:
        """Yield the result of each cut of at most so many ranks."""
        return map(self._study, list_cuts(self.small, most_ranks))

    def _study(self, cut: Cut) -> Result:
        start = time.monotonic()
        records = self._train(cut, None)
        if isinstance(records, Failed):
            return Result(cut, time.monotonic() - start, refusal=records.error)
        result = Result(cut, time.monotonic() - start, verdict=self._judge(records, self.records, self.tolerance))
        if result.findings:
            defects = known_explanations(records[0].arguments, self.records[0].arguments, self.data)
            tries = {one.patch for one in defects if one.patch}
            confirmed = {patch: self._is_equal_with(cut, patch) for patch in sorted(tries)}
            explanations = [Explanation(one, confirmed.get(one.patch or "")) for one in defects]
            result.explanations = [one for one in explanations if one.is_confirmed] or explanations
            if not self.all_are_applied:
                result.goes_away = self._is_equal_with(cut, "all")
        return result

    def _is_equal_with(self, cut: Cut, patches: str) -> bool | None:
        """Whether the cut equals the reference with other patches; None where one of the two does not train then."""
        try:
            one, tolerance = self._measure_reference(patches)
        except UsageError:
            return None
        records = self._train(cut, patches)
        return None if isinstance(records, Failed) else not self._judge(records, one, tolerance).findings

    def _measure_reference(self, patches: str | None) -> tuple[list[Record], Tolerance]:
        cut = reference(self.small)
        one, moved = self._train(cut, patches), self._train(cut, patches, STEP)
        for records in (one, moved):
            if isinstance(records, Failed):
                raise UsageError(f"the run made small does not train on one rank: {records.error}")
        assert not isinstance(one, Failed) and not isinstance(moved, Failed)
        return one, Tolerance(compare(one, moved))

    def _train(self, cut: Cut, patches: str | None, step: float = 0.0) -> list[Record] | Failed:
        return run(Job(self.script, join(cut.flags), cut.ranks, self.data, self.draw, step, patches))

    @staticmethod
    def _judge(records: list[Record], one: list[Record], tolerance: Tolerance) -> Verdict:
        settings = RunSettings([SimpleNamespace(**records[0].arguments)], None)
        return judge(compare(one, records), tolerance, settings)
