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
from .cuts import ONE_RANK, Cut, sharded_reference
from .explanations import CRASH, WRONG_LOG, known_explanations_of_refusal, known_explanations_of_resume
from .flags import Flag, join
from .legitimate import Dependence
from .processes import Failed, run
from .study import Study
from .training import Job, Record
from .verdict import Verdict, judge

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
        dependences: what differs because Megatron defines it by the layout, with the reason.
        explanations: the known defects by which a resume loses state or is refused, and that the patches leave.
        goes_away: whether with all patches it is not refused and nothing differs; None where they are all applied,
            where nothing differs, and where it is refused on other ranks.
    """

    saved: Cut
    loaded: Cut
    seconds: float = 0.0
    refusal: str = ""
    deviations: list[Deviation] = field(default_factory=list)
    dependences: dict[Dependence, list[Deviation]] = field(default_factory=dict)
    explanations: list[Finding] = field(default_factory=list)
    goes_away: bool | None = None

    @property
    def is_same_layout(self) -> bool:
        return self.saved.name == self.loaded.name


def list_resumes(study: Study, cuts: list[Cut]) -> Iterator[Resume]:
    """Yield what is tried: each layout on the same ranks, one rank on those of each cut, and each cut on one rank."""
    one_rank = Cut(ONE_RANK, 1, sharded_reference(study.small))
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
        self._without_checkpoints: dict[Cut, list[Record] | Failed] = {}

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
            acting = known_explanations_of_refusal(self._arguments(resume), self.study.data)
            resume.explanations = [one for one in acting if one.kind == CRASH or resume.is_same_layout]
        else:
            (resume.deviations, resume.dependences, _), arguments = answer
            if resume.deviations:
                is_in_log = any(one.kind == "log" for one in resume.deviations)
                acting = known_explanations_of_resume(arguments, self.study.data)
                resume.explanations = [one for one in acting if is_in_log or one.kind != WRONG_LOG]
        is_to_explain = resume.deviations or (resume.refusal and resume.is_same_layout)
        if is_to_explain and not self.study.all_are_applied:
            answer = self._compare(resume, "all")
            resume.goes_away = not isinstance(answer, Failed) and not answer[0].findings

    def _arguments(self, resume: Resume) -> dict[str, object]:
        """Those of what was refused, saving or loading; {} where the layout does not train."""
        cut = resume.saved if isinstance(self._save(resume.saved, None), Failed) else resume.loaded
        if cut not in self._without_checkpoints:
            self._without_checkpoints[cut] = self._train(cut, None)
        trained = self._without_checkpoints[cut]
        names = dict.fromkeys(("save", "load"), str(self.folder))
        return {} if isinstance(trained, Failed) else trained[0].arguments | names

    def _compare(self, resume: Resume, patches: str | None = None) -> tuple[Verdict, dict[str, object]] | Failed:
        """What differs, and Megatron's arguments of the resume; or the error with which saving or loading has ended."""
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
            verdict = Verdict(sorted(beyond, key=lambda one: (one.step, -one.size)), {})
        else:
            runs = [RunSettings([SimpleNamespace(**ranks[0].arguments)], None) for ranks in (went_on, resumed)]
            verdict = judge(deviations, self.study.reference.tolerance, *runs)
        return verdict, resumed[0].arguments | {"save": str(self.folder)}

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
