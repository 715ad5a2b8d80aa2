"""Compares all cuts of a run with the run on one rank, and says what each deviation is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .. import rehearsal, status
from ..doctor.findings import Finding
from ..engine import PatchError, UsageError
from ..engine.state import State
from ..rehearsal import transformer_engine
from .comparison import Deviation
from .controls import CONTROLS, Control
from .cuts import Cut, reference_flags
from .explanations import WRONG_LOG, known_explanations
from .flags import Flag
from .processes import Failed
from .small import SmallRun
from .training import FrameworkRun, Record
from .trainings import TrainingError, Trainings, judge_cut
from .verdict import Verdict


class Explanation(NamedTuple):
    """A known defect that acts in a cut with findings.

    Attributes:
        defect: what `doctor` says of it.
        is_confirmed: whether the findings go away with its patch, and those of the other confirmed ones; None where
            that cannot be tried.
    """

    defect: Finding
    is_confirmed: bool | None


@dataclass
class Result:
    """What came of a cut.

    Attributes:
        cut: its layout.
        seconds: that it took to train.
        refusal: the error with which Megatron refused the cut; '' where it trained.
        verdict: what deviates; None where it was refused.
        goes_away: whether all findings go away with all patches applied; None where they are, or nothing was found.
        explanations: the known defects whose patches make it equal; where there are none, all that act in it, those
            that do not act in the reference first.
        controls: whether it is equal under each control that trains; {} where explanations are confirmed.
        not_told_apart: the known defects that act in a cut without findings, and whose effect may be in what Megatron
            defines by cut.
    """

    cut: Cut
    seconds: float
    refusal: str = ""
    verdict: Verdict | None = None
    goes_away: bool | None = None
    explanations: list[Explanation] = field(default_factory=list)
    controls: dict[str, bool] = field(default_factory=dict)
    not_told_apart: list[Finding] = field(default_factory=list)

    @property
    def findings(self) -> list[Deviation]:
        return self.verdict.findings if self.verdict else []

    @property
    def depends_on_cut(self) -> bool:
        """Its gradients deviate, as Megatron defines them."""
        dependences = self.verdict.dependences if self.verdict else {}
        return any(one.kind == "gradient" for several in dependences.values() for one in several)

    @property
    def is_explained(self) -> bool:
        """Known defects explain what was found, as far as their patches can tell."""
        return any(one.is_confirmed or one.defect.patch is None for one in self.explanations)


def applied_patches() -> list[str]:
    """The patches of this process."""
    return [report.id for report in status() if report.state is not State.DISABLED]


class MissingPackageError(PatchError):
    """A package that the run needs cannot be imported; the message names it."""

    exit_code = 125


class Study:
    """The comparisons of one small run, with the patches of this process.

    Args:
        script: the file that a user starts, or the run of a framework.
        small: its run.
        data: the kind of samples.

    Raises:
        MissingPackageError: the run imports a package that is not installed, or has layers of one.
        UsageError: Megatron refuses the run on one rank, or it fails.
    """

    def __init__(self, script: str | FrameworkRun, small: SmallRun, data: str) -> None:
        self.small, self.data = small, data
        self.applied = applied_patches()
        self.carriers = () if isinstance(script, str) else script.carriers
        self.all_are_applied = len(self.applied) == len(status())
        has_own_layers = Flag("--transformer-impl", ("local",)) in small.flags
        if not has_own_layers and not rehearsal.with_transformer_engine():
            raise MissingPackageError(
                "the run has layers of TransformerEngine, whose Python is not in this environment: "
                f"{transformer_engine.installation_advice()}; or compare Megatron's own layers, by --transformer-impl "
                "local"
            )
        try:
            self.trainings = Trainings(script, reference_flags(small), data)
        except TrainingError as error:
            is_missing = str(error).startswith(("ModuleNotFoundError: ", "ImportError: "))
            refused = MissingPackageError if is_missing else UsageError
            raise refused(f"the run made small does not train on one rank: {error}") from error
        self.reference = self.trainings.reference

    @property
    def notes(self) -> list[str]:
        """What weakens the comparisons, as sentences without a full stop."""
        unplaced = self.reference.record.unplaced
        unsteady = (
            "each draw of weights has numbers that a small change moves far, as choices of experts or directions of "
            "Muon, so large deviations pass"
        )
        unfused = (
            "TransformerEngine's Python is not in this environment, so nothing is fused, weight gradients included: "
            "what only fused operations do wrong is not compared"
        )
        notes = [f"not compared, because sharded_state_dict has no place for them: {', '.join(unplaced)}"]
        return (
            notes * bool(unplaced)
            + [unsteady] * (not self.reference.tolerance.is_steady)
            + [unfused] * (not rehearsal.with_transformer_engine())
        )

    def results(self, cuts: Iterable[Cut]) -> Iterator[Result]:
        """Yield the result of each cut."""
        return map(self._study, cuts)

    def _study(self, cut: Cut) -> Result:
        start = time.monotonic()
        records = self.trainings.train(cut.flags, cut.ranks)
        if isinstance(records, Failed):
            return Result(cut, time.monotonic() - start, refusal=records.error)
        verdict = judge_cut(self.reference, records)
        result = Result(cut, time.monotonic() - start, verdict=verdict)
        if result.findings:
            result.explanations = self._explain(cut, records, verdict.findings)
            if not self.all_are_applied:
                result.goes_away = self._is_equal(cut, "all")
            if not result.is_explained:
                tried = {control.name: self._is_equal_under(cut, control) for control in CONTROLS}
                result.controls = {name: is_equal for name, is_equal in tried.items() if is_equal is not None}
        elif result.depends_on_cut:
            result.not_told_apart = [one for one, is_in_reference in self._acting(records) if not is_in_reference]
        return result

    def _acting(self, records: list[Record]) -> list[tuple[Finding, bool]]:
        return known_explanations(records[0].arguments, self.reference.record.arguments, self.data)

    def _explain(self, cut: Cut, records: list[Record], findings: list[Deviation]) -> list[Explanation]:
        is_in_log = any(one.kind == "log" for one in findings)
        acting = [one for one, _ in self._acting(records) if is_in_log or one.kind != WRONG_LOG]
        patches = sorted({one.patch for one in acting if one.patch})
        is_equal = {patch: self._is_equal_with(cut, [patch]) for patch in patches}
        needed = {patch for patch in patches if is_equal[patch]}
        if not needed and len(patches) > 1 and self._is_equal_with(cut, patches):
            needed = set(patches)
            for patch in patches:
                if self._is_equal_with(cut, sorted(needed - {patch})):
                    needed.remove(patch)
            is_equal |= dict.fromkeys(needed, True)
        explanations = [Explanation(one, is_equal.get(one.patch or "")) for one in acting]
        return [one for one in explanations if one.defect.patch in needed] or explanations

    def _is_equal_with(self, cut: Cut, patches: list[str]) -> bool | None:
        """Whether the cut is equal with these patches in addition to those of this process, and with their carriers."""
        return self._is_equal(cut, ",".join([*self.applied, *self.carriers, *patches]))

    def _is_equal(self, cut: Cut, patches: str) -> bool | None:
        """Whether the cut equals one rank with other patches; None where one of the two does not train."""
        return self._compare(cut, reference_flags(self.small), patches)

    def _is_equal_under(self, cut: Cut, control: Control) -> bool | None:
        """Whether the changed cut equals the changed reference; None where nothing changes, or one does not train."""
        changed = cut._replace(flags=control.change(cut.flags))
        if changed.flags == cut.flags:
            return None
        return self._compare(changed, control.change(reference_flags(self.small)))

    def _compare(self, cut: Cut, on_one_rank: tuple[Flag, ...], patches: str | None = None) -> bool | None:
        reference = self.trainings.other_reference(on_one_rank, patches)
        if isinstance(reference, Failed):
            return None
        records = self.trainings.train(cut.flags, cut.ranks, patches)
        return None if isinstance(records, Failed) else not judge_cut(reference, records).findings
