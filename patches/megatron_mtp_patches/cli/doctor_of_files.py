"""`doctor --batch FILES`: which known defects affect each of many runs, with one import of Megatron."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from .. import apply, revert
from ..checks.command_line import read
from ..checks.configuration import Configuration
from ..checks.diagnosis import Finding, Settings, find_defects
from ..checks.launch_script import Command
from ..checks.run_files import read_runs
from ..engine import PatchError, UsageError
from ..megatrons.installed import describe_megatron
from .console import make_say
from .doctor_of_flags import FAILS_FROM, check_world_size, describe, prepare, silence, style_of
from .zero_touch import VARIABLE, is_enabled


class Diagnosis(NamedTuple):
    """What is known of a run: why it is refused; else its defects.

    Attributes:
        run: its name, after the file.
        unusable: why the file has no run.
        refusal: Megatron's words, or ours for patches that the file chooses and that there are not.
        hints: the flags that Megatron does not know, what may be meant, what the file leaves open, and what keeps
            settings of the patches from acting.
        has_idle_settings: a flag that Megatron does not know resembles one of its own, or something keeps settings of
            the patches in a configuration from acting.
    """

    run: str
    unusable: str = ""
    refusal: str = ""
    hints: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    has_idle_settings: bool = False


def diagnose_files(files: list[str], world_size: int | None, transformer_engine: str | None, as_json: bool) -> int:
    """Print the defects that affect the run of each file.

    `run_files.py` says which files these are. Returns 1 if the patches leave a defect of severity 3 or more, else 2 if
    a run is refused, a file has none or has settings that do not act, else 0.

    Raises:
        PatchError: Megatron is not installed.
        UsageError: `transformer_engine` is not a version, no run has so many ranks, or Megatron's trainer is missing.
    """
    check_world_size(world_size)
    version, _ = prepare(transformer_engine)
    diagnoses = [one for file in files for one in _diagnose_file(file, world_size, version)]
    if as_json:
        rows = [
            {
                "file": one.run,
                "unusable": one.unusable,
                "refused": one.refusal,
                "hints": one.hints,
                "defects": [dataclasses.asdict(finding) for finding in one.findings],
            }
            for one in diagnoses
        ]
        print(json.dumps({"megatron": describe_megatron(), "runs": rows}, indent=1))
    else:
        _show(diagnoses)
    if any(_has_severe(one) for one in diagnoses):
        return 1
    return 2 if any(one.refusal or one.unusable or one.has_idle_settings for one in diagnoses) else 0


def _has_severe(one: Diagnosis) -> bool:
    return any(finding.severity >= FAILS_FROM and not finding.is_removed for finding in one.findings)


def _diagnose_file(file: str, world_size: int | None, version: str | None) -> Iterator[Diagnosis]:
    try:
        runs = read_runs(Path(file))
    except UsageError as error:
        yield Diagnosis(file, unusable=str(error))
        return
    for name, run in runs:
        if isinstance(run, Command):
            yield _diagnose_command(name, run, world_size, version, Path(file).parent)
        else:
            yield _diagnose_configuration(name, run, world_size, version)


def _diagnose_configuration(name: str, run: Configuration, world_size: int | None, version: str | None) -> Diagnosis:
    ranks = [] if world_size is None else [SimpleNamespace(world_size=world_size)]
    try:
        with _patches(run.patches):
            findings = tuple(find_defects(Settings([*ranks, *run.sources], version)))
    except PatchError as error:
        return Diagnosis(name, refusal=str(error), hints=(*run.hints, *run.notes))
    return Diagnosis(name, hints=(*run.hints, *run.notes), findings=findings, has_idle_settings=bool(run.hints))


def _diagnose_command(name: str, run: Command, world_size: int | None, version: str | None, folder: Path) -> Diagnosis:
    """The diagnosis of the run that a file in `folder` describes, with the patches that the file chooses."""
    choice = run.variables.get(VARIABLE, "").strip()
    hints = []
    world_size = world_size or run.world_size()
    if world_size is None and run.torchrun_options():
        hints.append("torchrun's options are not known as numbers: give --world-size N")
    if run.script and not (choice and is_enabled()) and not run.loads_patches(folder):
        hints.append(
            f"nothing here shows that this run has the patches: start {run.script} by -m megatron_mtp_patches run, "
            f"import megatron_mtp_patches in it, or `megatron-mtp-patches enable` and set {VARIABLE}"
        )
    if unset := run.unset():
        hints.append(
            f"not set in this file: {' '.join(unset)}. Set such a variable in the environment of this command, or "
            f"write its value into the file"
        )
    if positional := run.positional():
        hints.append(
            f"not known: {' '.join(positional)}, with which the script is called. Write these flags into the file"
        )
    if run.conditional:
        hints.append(
            f"conditions are not evaluated: the last value that the file gives counts for {', '.join(run.conditional)}"
        )
    try:
        with _patches(choice):
            with silence():
                line = read(run.flags, world_size)
            findings = tuple(find_defects(Settings(line.sources, version)))
    except (PatchError, UsageError) as error:
        return Diagnosis(name, refusal=str(error), hints=tuple(hints))
    return Diagnosis(
        name, hints=(*line.unknown.hints(), *hints), findings=findings, has_idle_settings=bool(line.unknown.similar)
    )


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


def _show(diagnoses: list[Diagnosis]) -> None:
    say = make_say()
    say(describe_megatron())
    for one in diagnoses:
        problem = one.unusable or one.refusal
        say(f"{one.run}: {problem or f'known defects: {len(one.findings)}'}", "yellow" if problem else "bold")
        for hint in one.hints:
            say(hint, "yellow")
        for finding in one.findings:
            say(describe(finding), style_of(finding))
    refused = sum(bool(one.refusal) for one in diagnoses)
    affected = sum(any(not finding.is_removed for finding in one.findings) for one in diagnoses)
    severe = sum(map(_has_severe, diagnoses))
    unusable = sum(bool(one.unusable) for one in diagnoses)
    without_run = f" Files without a run: {unusable}." if unusable else ""
    say(
        f"Runs: {len(diagnoses) - unusable}; {affected} with a defect that is not removed, {severe} with one of "
        f"severity {FAILS_FROM} or more, {refused} that are refused.{without_run}"
    )
