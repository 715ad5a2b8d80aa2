"""`doctor --batch FILES`: which known defects affect each of many runs, with one import of Megatron."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from ..defects.diagnosis import Finding, Settings, find_defects
from ..engine import UsageError
from ..installed_megatron import describe_megatron
from .command_line import read
from .console import make_say
from .diagnose import FAILS_FROM, describe, prepare, silence, style_of
from .run_files import read_runs


class Diagnosis(NamedTuple):
    """What is known of a run: Megatron's words where it refuses the flags; else its defects.

    Attributes:
        hints: the flags that Megatron does not know, and what may be meant.
    """

    run: str
    refusal: str
    hints: list[str]
    findings: list[Finding]


def diagnose_files(files: list[str], transformer_engine: str | None, as_json: bool) -> int:
    """Print the defects that affect the run of each file.

    `run_files.py` says which files these are. Returns 1 if the patches leave a defect of severity 3 or more, else 2 if
    Megatron refuses a run, else 0.

    Raises:
        UsageError: a file cannot be read, or is none of these.
    """
    runs = [run for file in files for run in read_runs(Path(file))]
    version, _ = prepare(transformer_engine)
    diagnoses = [_diagnose(name, run, version) for name, run in runs]
    if as_json:
        rows = [
            {
                "file": one.run,
                "refused": one.refusal,
                "hints": one.hints,
                "defects": [dataclasses.asdict(finding) for finding in one.findings],
            }
            for one in diagnoses
        ]
        print(json.dumps({"megatron": describe_megatron(), "runs": rows}, indent=1))
    else:
        _show(diagnoses)
    findings = [finding for one in diagnoses for finding in one.findings]
    if any(finding.severity >= FAILS_FROM and not finding.is_removed for finding in findings):
        return 1
    return 2 if any(one.refusal for one in diagnoses) else 0


def _diagnose(name: str, run: list[str] | SimpleNamespace, version: str | None) -> Diagnosis:
    hints: list[str] = []
    try:
        if isinstance(run, list):
            with silence():
                line = read(run, None)
            sources, hints = line.sources, list(line.unknown.hints())
        else:
            sources = run.sources
        return Diagnosis(name, "", hints, list(find_defects(Settings(sources, version))))
    except UsageError as error:
        return Diagnosis(name, str(error), hints, [])


def _show(diagnoses: list[Diagnosis]) -> None:
    say = make_say()
    say(describe_megatron())
    for one in diagnoses:
        say(f"{one.run}: {one.refusal or f'known defects: {len(one.findings)}'}", "yellow" if one.refusal else "bold")
        for hint in one.hints:
            say(hint, "yellow")
        for finding in one.findings:
            say(describe(finding), style_of(finding))
    refused = sum(bool(one.refusal) for one in diagnoses)
    affected = sum(any(not finding.is_removed for finding in one.findings) for one in diagnoses)
    say(f"Runs: {len(diagnoses)}; {affected} with a defect that is not removed, {refused} that Megatron refuses.")
