"""Resumes of a small run: saved after the first step, loaded on the same ranks and on others, and compared with the run
that went on."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from ..doctor.findings import Finding, RunSettings
from .comparison import Deviation, compare, compare_random_states, compare_weights
from .cuts import Cut, sharded_reference
from .explanations import known_explanations_of_resume
from .flags import Flag, join
from .processes import Failed, run
from .study import Study
from .training import Job, Record
from .verdict import judge

STEPS = 3
# A rate that the scheduler has to remember, and a checkpoint after each step.
_SCHEDULE = (
    Flag("--train-iters", (str(STEPS),)),
    Flag("--lr-decay-style", ("linear",)),
    Flag("--min-lr", ("0.01",)),
    Flag("--lr-decay-iters", ("8",)),
    Flag("--save-interval", ("1",)),
)


@dataclass
class Resume:
    """A resume of a small run.

    Attributes:
        saved, loaded: the layouts.
        seconds: that its trainings took.
        refusal: the error with which saving or loading has ended; '' where neither has.
        deviations: what differs in the steps after the checkpoint, step by step.
        explanations: the known defects by which a resume loses state, and that the patches leave.
        goes_away: whether nothing differs with all patches; None where they are all applied, or nothing differs.
    """

    saved: Cut
    loaded: Cut
    seconds: float = 0.0
    refusal: str = ""
    deviations: list[Deviation] = field(default_factory=list)
    explanations: list[Finding] = field(default_factory=list)
    goes_away: bool | None = None

    @property
    def is_same_layout(self) -> bool:
        return self.saved.name == self.loaded.name


def list_resumes(study: Study, cuts: list[Cut]) -> Iterator[Resume]:
    """Yield what is tried: each layout on the same ranks, one rank on those of each cut, and each cut on one rank."""
    one_rank = Cut("one rank", 1, sharded_reference(study.small))
    for cut in (one_rank, *cuts):
        yield Resume(cut, cut)
    for cut in cuts:
        yield Resume(one_rank, cut)
        yield Resume(cut, one_rank)


class Resumes:
    """The resumes of a study, with a checkpoint of each layout that is saved once."""

    def __init__(self, study: Study, folder: str) -> None:
        self.study, self.folder = study, Path(folder)
        self._went_on: dict[tuple[str, str | None], list[Record] | Failed] = {}

    def try_all(self, cuts: list[Cut]) -> Iterator[Resume]:
        """Yield each resume when its answer is known."""
        for resume in list_resumes(self.study, cuts):
            start = time.monotonic()
            self._try(resume)
            resume.seconds = time.monotonic() - start
            yield resume

    def _try(self, resume: Resume) -> None:
        answer = self._compare(resume)
        if isinstance(answer, Failed):
            resume.refusal = answer.error
            return
        resume.deviations, arguments = answer
        if resume.deviations:
            resume.explanations = known_explanations_of_resume(arguments, self.study.data)
            if not self.study.all_are_applied:
                answer = self._compare(resume, "all")
                resume.goes_away = not isinstance(answer, Failed) and not answer[0]

    def _compare(
        self, resume: Resume, patches: str | None = None
    ) -> tuple[list[Deviation], dict[str, object]] | Failed:
        went_on = self._save(resume.saved, patches)
        if isinstance(went_on, Failed):
            return went_on
        resumed = self._train(resume.loaded, patches, Flag("--load", (str(self._checkpoint(resume.saved, patches)),)))
        if isinstance(resumed, Failed):
            return resumed
        rest = [record.after(STEPS - len(resumed[0].norms)) for record in went_on]
        deviations = [*compare_weights(rest, resumed), *compare(rest, resumed)]
        if resume.is_same_layout:
            deviations += compare_random_states(rest, resumed)
            beyond = [one for one in deviations if one.size]  # where nothing is added in another order
        else:
            runs = [RunSettings([SimpleNamespace(**ranks[0].arguments)], None) for ranks in (went_on, resumed)]
            beyond = judge(deviations, self.study.reference.tolerance, *runs).findings
        beyond.sort(key=lambda one: (one.step, -one.size))
        return beyond, resumed[0].arguments | {"save": str(self.folder)}

    def _save(self, cut: Cut, patches: str | None) -> list[Record] | Failed:
        """The run that went on; of its checkpoints, the first one is the one to load."""
        key = cut.name, patches
        if key not in self._went_on:
            folder = self._checkpoint(cut, patches)
            self._went_on[key] = self._train(cut, patches, Flag("--save", (str(folder),)))
            if not isinstance(self._went_on[key], Failed):
                (folder / "latest_checkpointed_iteration.txt").write_text("1")
        return self._went_on[key]

    def _checkpoint(self, cut: Cut, patches: str | None) -> Path:
        return self.folder / f"{cut.name} {patches or ''}".strip().replace(" ", "_")

    def _train(self, cut: Cut, patches: str | None, *more: Flag) -> list[Record] | Failed:
        names = {flag.name for flag in _SCHEDULE}
        flags = [flag for flag in cut.flags if flag.name not in names]
        if (ckpt_format := getattr(self.study.small.settings, "ckpt_format", None)) is not None:
            flags = [*(flag for flag in flags if flag.name != "--ckpt-format"), Flag("--ckpt-format", (ckpt_format,))]
        trainings = self.study.trainings
        words = join([*flags, *_SCHEDULE, *more])
        return run(Job(trainings.script, words, cut.ranks, self.study.data, trainings.draw, patches=patches))


def try_resumes(study: Study, cuts: list[Cut]) -> Iterator[Resume]:
    """Yield each resume of a study; the checkpoints are removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield from Resumes(study, folder).try_all(cuts)
