"""`doctor --batch FILES`: which known defects affect each of many runs, with one import of Megatron."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..defects.diagnosis import Finding, Settings, find_defects
from ..engine import UsageError
from ..installed_megatron import describe_megatron
from .command_line import read
from .console import make_console
from .diagnose import FAILS_FROM, describe, prepare, silence, style_of


def diagnose_files(files: list[str], transformer_engine: str | None, as_json: bool) -> int:
    """Print the defects that affect the run of each file; 1 if one of severity 3 or more is not removed by the patches.

    A file is a recipe of Megatron-LM's functional tests (MODEL_ARGS), a run_config.yaml of Megatron-Bridge, or flags as
    text. What Megatron refuses is said in its words and counts as no defect.

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


def read_runs(file: Path) -> list[tuple[str, list[str] | SimpleNamespace]]:
    """The runs of a file, named after it: the flags of each, or as `sources` the sections of its configuration."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if file.suffix not in (".yaml", ".yml"):
        return [(str(file), shlex.split(text, comments=True))]
    content = _parse_yaml(file, text)
    recipes = {name: flags for name, flags in content.items() if re.fullmatch(r"MODEL_ARGS(_\d+)?", str(name))}
    if recipes and all(isinstance(flags, dict) for flags in recipes.values()):
        several = len(recipes) > 1
        return [
            (f"{file} {name}" if several else str(file), [word for pair in flags.items() for word in _words(*pair)])
            for name, flags in recipes.items()
        ]
    if isinstance(content.get("model"), dict):
        sections = [section for section in content.values() if isinstance(section, dict)]
        return [(str(file), SimpleNamespace(sources=[SimpleNamespace(**_named(section)) for section in sections]))]
    raise UsageError(
        f"{file} has neither MODEL_ARGS, as a recipe of Megatron-LM, nor a section `model`, as a run_config.yaml of "
        f"Megatron-Bridge"
    )


def _parse_yaml(file: Path, text: str) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"{file}: reading YAML needs pyyaml (pip install pyyaml)") from error
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is not YAML: {error}") from error
    return content if isinstance(content, dict) else {}


def _words(flag: str, value: object) -> list[str]:
    """As Megatron-LM's functional tests make them: true is a switch that is on, false and null one that is off."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    text = str(value)
    in_brackets = re.fullmatch(r"\[([\w ]+)\]", text)  # several words, not a list that Megatron reads itself
    return [flag, *shlex.split(in_brackets[1] if in_brackets else text)]


def _named(section: dict[Any, Any]) -> dict[str, Any]:
    """A section without what YAML needs to make an object of it; a setting that is an object of its own is left out."""
    return {
        str(name): value
        for name, value in section.items()
        if not str(name).startswith("_") and not isinstance(value, dict)
    }
