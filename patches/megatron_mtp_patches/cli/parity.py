"""`parity -- FLAGS`, `parity --batch FILES`: does a run compute the same numbers on every parallel layout?"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..doctor.configuration import Configuration, find_problems
from ..doctor.launch_script import Command
from ..doctor.run_files import read_runs
from ..engine import UsageError
from ..megatrons.installed import describe_megatron
from ..parity.cuts import ONE_RANK, Cut, list_cuts
from ..parity.frameworks import make_run
from ..parity.processes import prepare
from ..parity.report import write_report
from ..parity.resume import Resume, try_resumes
from ..parity.scripts import find_script
from ..parity.small import SmallRun, shrink
from ..parity.study import MissingPackageError, Result, Study
from ..parity.training import FrameworkRun
from .console import make_printer
from .parity_output import describe_study, show_result, show_run, show_summary
from .resume_output import describe_resume, show_resume, show_summary_of_resumes

GOES_AWAY, STAYS = 1, 3  # exit codes


class Options(NamedTuple):
    """The options of the command.

    Attributes:
        script: the file that a user starts; None for the one of a launch script, or Megatron-LM's.
        ranks: the most of a cut.
        cuts: the names of the cuts to train; all if there is none.
        data: "uneven" loss masks, or "whole" ones.
        dtype: "fp32" or "bf16", of the small run.
        save: where to write a program that shows the first finding; '' for nowhere.
        resumes: compare resumes with the run that went on, and not cuts with one rank.
        as_json: print one JSON object at the end, and nothing before.
    """

    script: str | None
    ranks: int
    cuts: list[str]
    data: str
    dtype: str
    save: str
    resumes: bool
    as_json: bool


class _Run(NamedTuple):
    """A run to study: its name, its script and its flags, or a framework's; or why it cannot be studied.

    `configuration` is what the file of a framework has.
    """

    name: str
    script: str | FrameworkRun = ""
    flags: tuple[str, ...] = ()
    configuration: Configuration | None = None
    refusal: str = ""

    def find_hints(self) -> list[str]:
        """Say what keeps its settings of the patches from acting; Megatron must be importable, as after prepare()."""
        run = self.configuration
        return [] if run is None else [*find_problems(run), *run.hints]


def compare_cuts(words: list[str], options: Options) -> int:
    """Train a small copy of the run with these flags on one rank and on each cut of its layout; print what differs.

    Returns 0 if every cut equals one rank, or differs as Megatron defines it, 1 if those that do not would with all
    patches, 3 if one would not, 2 if all that train are equal and one does not train.

    Raises:
        PatchError: the script or Megatron's trainer does not import.
        UsageError: there is no script, the run made small does not train on one rank, or none of its cuts does.
    """
    return _study_all([_Run("", find_script("", words, options.script), tuple(words))], options, is_batch=False)


def compare_cuts_of_files(files: list[str], options: Options) -> int:
    """Do the same for the run of each file, with one import of Megatron.

    A run that is refused, or is none that parity trains, is named; the code is 2 then, unless a cut differs.
    """
    return _study_all([run for file in files for run in _read_file(file, options.script)], options, is_batch=True)


def _read_file(file: str, script: str | None) -> Iterator[_Run]:
    try:
        runs = read_runs(Path(file))
    except UsageError as error:
        yield _Run(file, refusal=str(error))
        return
    for name, run in runs:
        try:
            if isinstance(run, Command):
                yield _Run(name, find_script(run.script, run.flags, script), tuple(run.flags))
            else:
                yield _Run(name, make_run(run), configuration=run)
        except UsageError as error:
            yield _Run(name, refusal=str(error))


def _study_all(runs: list[_Run], options: Options, is_batch: bool) -> int:
    start = time.monotonic()
    show: Callable[..., None] = (lambda *_, **__: None) if options.as_json else make_printer()
    if options.save and not Path(options.save).absolute().parent.is_dir():
        raise UsageError(f"--save {options.save}: there is no such folder")
    os.environ["MEGATRON_MTP_PATCHES_DEFECTS"] = "off"  # the line of known defects; this command says them
    imported: set[str] = set()
    codes: list[int] = []
    answers: list[dict[str, Any]] = []
    for run in runs:
        if run.name:
            show(f"\n{run.name}", style="bold")
        try:
            if run.refusal:
                raise UsageError(run.refusal)
            trainer = run.script if isinstance(run.script, str) else run.script.trainer
            if trainer not in imported:
                with _quiet():
                    prepare(run.script)
                imported.add(trainer)
            hints = run.find_hints()
            for hint in hints:
                show(hint, style="yellow")
            if options.resumes:
                resumes = _try_resumes(run, options, show, start)
                answers.append({"run": run.name, "hints": hints, "resumes": list(map(describe_resume, resumes))})
                codes.append(_exit_code_of_resumes(resumes))
                continue
            study, results = _study(run, options, show, start)
        except (MissingPackageError, UsageError) as error:
            if not is_batch:
                raise
            show(f"refused: {error}", style="yellow")
            answers.append({"run": run.name, "refused": str(error)})
            codes.append(error.exit_code)
        else:
            answers.append({"run": run.name, "hints": hints, **describe_study(study, results)})
            codes.append(_exit_code(results))
    order = (STAYS, GOES_AWAY, UsageError.exit_code, MissingPackageError.exit_code)
    code = next((one for one in order if one in codes), 0)
    if options.as_json:
        facts: dict[str, Any] = {"megatron": describe_megatron(), "exit_code": code}
        print(json.dumps({**facts, "runs": answers} if is_batch else {**facts, **answers[0]}, indent=1))
    return code


def _begin(run: _Run, options: Options, show: Callable[..., None], start: float) -> tuple[Study, list[Cut]]:
    """Make the run small and train it on one rank; also return its cuts."""
    with _quiet():
        script, dtype = run.script, options.dtype
        small = shrink(list(run.flags), dtype) if isinstance(script, str) else script.shrink(dtype)
    cuts = _choose_cuts(small, options)
    show_run(show, run.script, small, options.data, options.ranks)
    study = Study(run.script, small, options.data)
    draws = f", with draw {study.trainings.draw + 1} of weights" * (study.trainings.draw > 0)
    show(f"one rank: trained{draws}, {time.monotonic() - start:.0f} s since the start")
    for note in study.notes:
        show(note, style="yellow")
    return study, cuts


def _study(run: _Run, options: Options, show: Callable[..., None], start: float) -> tuple[Study, list[Result]]:
    study, cuts = _begin(run, options, show, start)
    results: list[Result] = []
    try:
        for result in study.results(cuts):
            results.append(result)
            show_result(show, result)
    except KeyboardInterrupt:
        show_summary(show, results, time.monotonic() - start)
        sys.exit(128 + signal.SIGINT)
    if not any(one.verdict for one in results):
        raise UsageError(f"none of its cuts trains: {', '.join(one.cut.name for one in results)}")
    show_summary(show, results, time.monotonic() - start)
    if options.save and isinstance(run.script, str):
        show(write_report(Path(options.save), run.script, study, results))
    return study, results


def _try_resumes(run: _Run, options: Options, show: Callable[..., None], start: float) -> list[Resume]:
    if not isinstance(run.script, str):
        raise UsageError("--resume is for runs of Megatron's trainer: parity saves no checkpoint of a framework")
    study, cuts = _begin(run, options, show, start)
    results = []
    try:
        for result in try_resumes(study, cuts):
            results.append(result)
            show_resume(show, result)
    except KeyboardInterrupt:
        show_summary_of_resumes(show, results, time.monotonic() - start)
        sys.exit(128 + signal.SIGINT)
    show_summary_of_resumes(show, results, time.monotonic() - start)
    return results


def _exit_code_of_resumes(results: list[Resume]) -> int:
    differing = [one for one in results if one.deviations]
    if not differing:
        return UsageError.exit_code * any(one.refusal and one.is_same_layout for one in results)
    return GOES_AWAY if all(one.goes_away for one in differing) else STAYS


def _choose_cuts(small: SmallRun, options: Options) -> list[Cut]:
    cuts = list(list_cuts(small, options.ranks))
    names = [cut.name for cut in cuts] + [ONE_RANK] * options.resumes
    if unknown := [name for name in options.cuts if name not in names]:
        raise UsageError(f"no cut of this layout and --ranks {options.ranks} is {unknown[0]!r}: {', '.join(names)}")
    return [cut for cut in cuts if not options.cuts or cut.name in options.cuts]


def _exit_code(results: list[Result]) -> int:
    differing = [one for one in results if one.findings]
    if not differing:
        return UsageError.exit_code * any(one.verdict is None for one in results)
    return GOES_AWAY if all(one.goes_away for one in differing) else STAYS


@contextmanager
def _quiet() -> Iterator[None]:
    """Send what Megatron and a script print while they are imported to nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in enumerate(kept, 1):
            os.dup2(file, number)
            os.close(file)
