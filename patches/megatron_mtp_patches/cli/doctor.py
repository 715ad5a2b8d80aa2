"""`doctor -- FLAGS`: which known defects affect a run."""

from __future__ import annotations

import json
from dataclasses import asdict

from ..doctor.findings import Finding, RunSettings, find_defects
from ..doctor.flags import CommandLine, read, refusals
from ..engine import UsageError
from ..megatrons.installed import describe_megatron
from ..parity.trainer import import_trainer, prepare, silence
from .console import make_printer
from .doctor_output import exit_code, show_findings


def diagnose_flags(words: list[str], world_size: int | None, transformer_engine: str | None, as_json: bool) -> int:
    """Print the defects that affect a command line of Megatron's trainer.

    Returns 1 if one of severity 3 or more is not removed by the patches, else 2 if a flag that Megatron does not know
    resembles one of its own, else 0.

    Args:
        words: the flags, as after the name of the script.
        world_size: the number of ranks; None for the smallest that fits.
        transformer_engine: its version; None for the one that is installed, or else that the release was made for.

    Raises:
        PatchError: Megatron is not installed.
        UsageError: `transformer_engine` is not a version, Megatron's trainer is missing, or the flags are refused.
    """
    if {"--help", "-h"}.intersection(words):
        raise UsageError("Megatron's own flags are listed by your training script with --help")
    version, is_known = prepare(world_size, transformer_engine)
    import_trainer(version)
    with silence():
        line = read([word for word in words if word != "--"], world_size)
    with refusals():
        findings = list(find_defects(RunSettings(line.sources, version)))
    if as_json:
        facts = {
            "megatron": describe_megatron(),
            "transformer_engine": version,
            "transformer_engine_is_assumed": not is_known,
            "decided_by_checkpoint": line.decided_by_checkpoint(),
            "world_size": line.world_size,
            "assumed_environment": line.environment,
            "unknown": line.unknown.names,
            "similar": line.unknown.similar,
            "without_effect": line.without_effect(),
            "defects": [asdict(finding) for finding in findings],
        }
        print(json.dumps(facts, indent=1))
    else:
        origin = "" if is_known else " (not installed; this release was made for it)"
        _show_flags(line, findings, f"TransformerEngine {version}{origin}" if version else "no TransformerEngine")
    return exit_code(findings, line.unknown.similar)


def _show_flags(line: CommandLine, findings: list[Finding], transformer_engine: str) -> None:
    show = make_printer()
    show(f"{describe_megatron()}\n{transformer_engine}; {line.world_size} rank{'s' * (line.world_size > 1)}")
    if line.environment:
        show(f"assumed in the environment of the run: {' '.join(map('='.join, line.environment.items()))}")
    for hint in line.unknown.hints():
        show(hint, "yellow")
    for flag in line.without_effect():
        show(f"{flag} has no effect: the model has no MTP heads; add --mtp-num-layers", "yellow")
    if decided := line.decided_by_checkpoint():
        show(f"the checkpoint decides {', '.join(decided)} and more: also give them as flags", "yellow")
    show_findings(show, findings)
    left = sum(not finding.is_removed for finding in findings)
    flags = "the flags that Megatron knows" if line.unknown.similar else "these flags"
    total = f"Known defects that affect {flags}: {len(findings)}"
    if not findings:
        show(f"No known defect of this Megatron affects {flags}.")
    elif left:
        show(f"{total}; {left} of them the patches do not remove.")
    else:
        show(f"{total}. `import megatron_mtp_patches` removes all of them.")
