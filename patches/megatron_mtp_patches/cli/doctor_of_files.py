"""`doctor --batch FILES`: which known defects affect each of many runs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from .. import apply, revert
from ..doctor.configuration import Configuration, find_problems
from ..doctor.findings import Finding, RunSettings, find_defects
from ..doctor.flags import read
from ..doctor.launch_script import Command
from ..doctor.run_files import read_runs
from ..engine import PatchError, UsageError
from ..megatrons.installed import describe_megatron
from ..parity.trainer import import_trainer, prepare, silence
from .console import make_printer
from .doctor_output import FAILS_FROM, exit_code, is_severe, show_findings
from .zero_touch import VARIABLE, is_enabled

_LACKS_RECORD = (
    f"nothing in this file shows that its run has the patches, so none counts: set {VARIABLE} for this command to what "
    f"the run has, as all or repairs"
)

_NEEDS_ENABLING = (
    f"the patches that {VARIABLE} chooses count as those of the run: they act only after `megatron-mtp-patches enable`"
)


class Diagnosis(NamedTuple):
    """The diagnosis of a run in a file: the reason why it is refused, or else its defects.

    Attributes:
        run: its name, after the file.
        unusable: why the file has no run.
        refusal: why Megatron refuses the flags, or why the patches that the file chooses cannot be applied.
        hints: the flags that Megatron does not know, what may be meant, what the file leaves open, and what keeps
            settings of the patches from acting.
        has_idle_settings: a flag that Megatron does not know resembles one of its own, or something keeps settings of
            the patches in a configuration from acting, or they are refused.
        may_lack_patches: nothing shows that the run has the patches, so no finding counts as removed.
        world_size: the number of ranks for which the defects were looked for; None where a configuration has none.
        is_sized: the command line or the file says so; else it is the smallest that fits.
    """

    run: str
    unusable: str = ""
    refusal: str = ""
    hints: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    has_idle_settings: bool = False
    may_lack_patches: bool = False
    world_size: int | None = None
    is_sized: bool = True


def diagnose_files(files: list[str], world_size: int | None, transformer_engine: str | None, as_json: bool) -> int:
    """Print the defects that affect the run of each file, with one import of Megatron, or none if no run has flags.

    `run_files.py` says which files these are. Returns 1 if the patches leave a defect of severity 3 or more, or if
    nothing shows that a run with one has the patches; else 2 if a run is refused, a file has none or has settings that
    do not act; else 0.

    Raises:
        PatchError: Megatron is not installed.
        UsageError: `transformer_engine` is not a version, no run has so many ranks, or Megatron's trainer is missing.
    """
    version, _ = prepare(world_size, transformer_engine)
    runs = [run for file in files for run in _read_file(Path(file))]
    if any(isinstance(run, Command) for _, _, run in runs):
        import_trainer(version)
    diagnoses = [_diagnose_run(*run, world_size, version) for run in runs]
    if as_json:
        rows = [
            {
                "file": one.run,
                "unusable": one.unusable,
                "refused": one.refusal,
                "world_size": one.world_size,
                "has_idle_settings": one.has_idle_settings,
                "hints": one.hints,
                "defects": [asdict(finding) for finding in one.findings],
            }
            for one in diagnoses
        ]
        print(json.dumps({"megatron": describe_megatron(), "runs": rows}, indent=1))
    else:
        _show_files(diagnoses)
    findings = (finding for one in diagnoses for finding in one.findings)
    return exit_code(findings, any(one.refusal or one.unusable or one.has_idle_settings for one in diagnoses))


def _read_file(file: Path) -> Iterator[tuple[Path, str, Command | Configuration | UsageError]]:
    """Yield the file, the name and the content of each of its runs, or why it has none."""
    try:
        for name, run in read_runs(file):
            yield file, name, run
    except UsageError as error:
        yield file, str(file), error


def _diagnose_run(
    file: Path, name: str, run: Command | Configuration | UsageError, world_size: int | None, version: str | None
) -> Diagnosis:
    if isinstance(run, UsageError):
        return Diagnosis(name, unusable=str(run))
    if isinstance(run, Command):
        return _diagnose_command(name, run, world_size, version, file.parent)
    return _diagnose_configuration(name, run, world_size, version)


def _diagnose_configuration(name: str, run: Configuration, world_size: int | None, version: str | None) -> Diagnosis:
    ranks = [] if world_size is None else [SimpleNamespace(world_size=world_size)]
    is_chosen = VARIABLE in os.environ or bool(run.patches and is_enabled())
    may_lack_patches = not run.shows_patches and not is_chosen
    hints = run.hints
    try:
        with _patches(run.patches):
            with silence():
                hints += tuple(find_problems(run))
            settings = RunSettings([*ranks, *run.sources], version)
            findings = tuple(find_defects(settings))
    except PatchError as error:
        return Diagnosis(name, refusal=str(error), hints=(*hints, *run.notes))
    notes = (
        *((_LACKS_RECORD,) if may_lack_patches and not run.hints else ()),
        *((_NEEDS_ENABLING,) if run.is_enabled_by_variable and not is_enabled() else ()),
        *run.notes,
    )
    return Diagnosis(
        name,
        hints=(*hints, *notes),
        findings=tuple(map(_without_patches, findings)) if may_lack_patches else findings,
        has_idle_settings=bool(hints),
        may_lack_patches=may_lack_patches,
        world_size=settings.world_size,
    )


def _diagnose_command(name: str, run: Command, world_size: int | None, version: str | None, folder: Path) -> Diagnosis:
    """The diagnosis of the run that a file in `folder` describes, with the patches that the file chooses."""
    choice = run.variables.get(VARIABLE, "").strip()
    world_size = world_size or run.world_size()
    loads_patches = True if choice and is_enabled() else run.loads_patches(folder)
    hints = tuple(run.hints(is_sized=world_size is not None, loads_patches=loads_patches, chooses_patches=bool(choice)))
    is_believed = loads_patches is None and bool(choice)
    may_lack_patches = bool(run.script) and not loads_patches and not is_believed
    try:
        with _patches(choice):
            with silence():
                line = read(run.flags, world_size)
            findings = tuple(find_defects(RunSettings([run.settings, *line.sources], version)))
    except PatchError as error:
        return Diagnosis(name, refusal=str(error), hints=hints, may_lack_patches=may_lack_patches)
    if may_lack_patches:
        findings = tuple(map(_without_patches, findings))
    return Diagnosis(
        name,
        hints=(*line.unknown.hints(), *hints),
        findings=findings,
        has_idle_settings=bool(line.unknown.similar),
        may_lack_patches=may_lack_patches,
        world_size=line.world_size,
        is_sized=world_size is not None,
    )


def _without_patches(finding: Finding) -> Finding:
    """The same defect in a run of which nothing shows that it has the patches."""
    if not finding.is_removed:
        return finding
    remedy = f"{finding.patch} removes it from a run that has the patches"
    return replace(finding, is_removed=False, remedy="; ".join(filter(None, (remedy, finding.remedy))))


@contextlib.contextmanager
def _patches(choice: str) -> Iterator[None]:
    """Have those patches in force that a run chooses, as in MEGATRON_MTP_PATCHES; with '' those of this process stay.

    Raises:
        PatchError: it has an id that does not exist.
    """
    if choice in ("", os.environ.get(VARIABLE, "all")):
        yield
        return
    revert()
    try:
        apply(choice, on_drift="skip")
        yield
    finally:
        revert()
        apply(on_drift="skip")


def _show_files(diagnoses: list[Diagnosis]) -> None:
    show = make_printer()
    show(describe_megatron())
    for one in diagnoses:
        problem = one.unusable or one.refusal
        show(f"{one.run}: {problem or _count(one)}", "yellow" if problem else "bold")
        for hint in one.hints:
            show(hint, "yellow")
        show_findings(show, one.findings)
    refused = sum(bool(one.refusal) for one in diagnoses)
    affected = sum(any(not finding.is_removed for finding in one.findings) for one in diagnoses)
    severe = sum(any(map(is_severe, one.findings)) for one in diagnoses)
    unusable = sum(bool(one.unusable) for one in diagnoses)
    idle = sum(one.has_idle_settings for one in diagnoses)
    unknown = sum(one.may_lack_patches for one in diagnoses)
    without_patches = f" Runs that may lack the patches: {unknown}." if unknown else ""
    without_run = f" Files without a run: {unusable}." if unusable else ""
    show(
        f"Runs: {len(diagnoses) - unusable}; {affected} with a defect that is not removed, {severe} with one of "
        f"severity {FAILS_FROM} or more, {idle} with settings that do not act or are refused, {refused} that cannot be "
        f"checked.{without_patches}{without_run}"
    )


def _count(one: Diagnosis) -> str:
    """The number of defects of a run, and for how many ranks they were looked for."""
    count = f"known defects: {len(one.findings)}"
    if one.world_size is None:
        return count
    origin = "" if one.is_sized else ", the fewest that fit"
    return f"{count}; {one.world_size} rank{'s' * (one.world_size > 1)}{origin}"
