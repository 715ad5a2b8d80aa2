"""`doctor --batch FILES`: which known defects affect each of many runs, with one import of Megatron."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ..defects.diagnosis import Finding, Settings, find_defects
from ..engine import UsageError
from ..installed_megatron import describe_megatron
from .command_line import read
from .console import make_console
from .diagnose import FAILS_FROM, describe, prepare, silence, style_of
from .run_files import read_runs


def diagnose_files(files: list[str], transformer_engine: str | None, as_json: bool) -> int:
    """Print the defects that affect the run of each file; 1 if one of severity 3 or more is not removed by the patches.

    `run_files.py` says which files these are. What Megatron refuses is said in its words and counts as no defect.

    Raises:
        UsageError: a file cannot be read, or is none of these.
    """
    runs = [run for file in files for run in read_runs(Path(file))]
    version, _ = prepare(transformer_engine)
    answers: list[tuple[str, str, list[Finding]]] = []
    for file, run in runs:
        try:
            with silence():
                sources = read(run, None).sources if isinstance(run, list) else run.sources
            answers.append((file, "", list(find_defects(Settings(sources, version)))))
        except UsageError as error:
            answers.append((file, str(error), []))
    if as_json:
        rows = [
            {"file": file, "refused": refusal, "defects": [dataclasses.asdict(one) for one in findings]}
            for file, refusal, findings in answers
        ]
        print(json.dumps({"megatron": describe_megatron(), "runs": rows}, indent=1))
    else:
        _show(answers)
    findings = [finding for _, _, some in answers for finding in some]
    return int(any(finding.severity >= FAILS_FROM and not finding.is_removed for finding in findings))


def _show(answers: list[tuple[str, str, list[Finding]]]) -> None:
    console = make_console()

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    say(describe_megatron())
    for file, refusal, findings in answers:
        say(f"{file}: {refusal or f'{len(findings)} known defects'}", "yellow" if refusal else "bold")
        for finding in findings:
            say(describe(finding), style_of(finding))
    refused = sum(bool(refusal) for _, refusal, _ in answers)
    affected = sum(any(not one.is_removed for one in findings) for _, _, findings in answers)
    say(f"{len(answers)} runs: {affected} with a defect that is not removed, {refused} that Megatron refuses.")
