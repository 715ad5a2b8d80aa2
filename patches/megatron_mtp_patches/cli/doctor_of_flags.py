"""`doctor -- FLAGS`: which known defects affect a command line of Megatron's trainer on the installed release."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import logging
import os
import warnings
from collections.abc import Iterator
from importlib import import_module

from .. import apply, rehearsal
from ..catalog import CATALOG
from ..checks.command_line import CommandLine, read, refusals
from ..checks.diagnosis import Finding, Settings, check_version, find_defects
from ..checks.start_line import VARIABLE
from ..declarations.description import argument_of, flag_of
from ..engine import AddField, AddFlag, PatchError, UsageError
from ..engine.source import find_file
from ..megatrons.installed import MEGATRON, describe_megatron, find_releases, find_transformer_engine, import_targets
from .console import make_say

FAILS_FROM = 3  # the severity of a defect from which on the command ends with 1
# What --use-checkpoint-args reads from the checkpoint and some defect depends on.
FROM_CHECKPOINT = (
    "--num-experts",
    "--moe-grouped-gemm",
    "--moe-layer-freq",
    "--disable-bias-linear",
    "--mtp-num-layers",
    "--mtp-use-repeated-layer",
    "--hybrid-layer-pattern",
)


def diagnose(words: list[str], world_size: int | None, transformer_engine: str | None, as_json: bool) -> int:
    """Print the defects that affect the command line.

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
    check_world_size(world_size)
    if {"--help", "-h"}.intersection(words):
        raise UsageError("Megatron's own flags are listed by your training script with --help")
    version, is_known = prepare(transformer_engine)
    with silence():
        line = read([word for word in words if word != "--"], world_size)
    with refusals():
        findings = list(find_defects(Settings(line.sources, version)))
    if as_json:
        print(
            json.dumps(
                {
                    "megatron": describe_megatron(),
                    "transformer_engine": version,
                    "transformer_engine_is_assumed": not is_known,
                    "decided_by_checkpoint": decided_by_checkpoint(line),
                    "world_size": line.world_size,
                    "assumed_environment": line.environment,
                    "unknown": line.unknown.names,
                    "similar": line.unknown.similar,
                    "without_effect": without_effect(line),
                    "defects": [dataclasses.asdict(finding) for finding in findings],
                },
                indent=1,
            )
        )
    else:
        origin = "" if is_known else " (not installed; this release was made for it)"
        _show(line, findings, f"TransformerEngine {version}{origin}" if version else "no TransformerEngine")
    if any(finding.severity >= FAILS_FROM and not finding.is_removed for finding in findings):
        return 1
    return UsageError.exit_code if line.unknown.similar else 0


def check_world_size(world_size: int | None) -> None:
    """Raise UsageError for a number of ranks that cannot be."""
    if world_size is not None and world_size < 1:
        raise UsageError(f"--world-size {world_size}: give a number of ranks")


def prepare(transformer_engine: str | None) -> tuple[str | None, bool]:
    """Import Megatron's trainer in a rehearsal; the version of TransformerEngine, and whether it is more than assumed.

    Raises:
        PatchError: Megatron is not installed.
        UsageError: `transformer_engine` is not a version, or Megatron's trainer is missing.
    """
    if transformer_engine is not None:
        try:
            check_version(transformer_engine)
        except ValueError as error:
            raise UsageError(f"--te: {error}") from error
    if find_file("megatron.core") is None:
        raise PatchError(describe_megatron())
    if find_file("megatron.training.arguments") is None:
        raise UsageError(
            "reading flags needs megatron.training; put a Megatron-LM checkout of this release on PYTHONPATH"
        )
    os.environ[VARIABLE] = "off"  # reading flags would print the line of a training's start
    if not hasattr(inspect.getsource, "cache_info"):
        # For each parser Megatron reads the help of its flags from the sources of its configurations: half of the time.
        vars(inspect)["getsource"] = functools.cache(inspect.getsource)
    apply(on_drift="skip")
    with silence():
        rehearsal.install(megatron_flags=False)
        import_targets(MEGATRON)
    version, is_known = (transformer_engine, True) if transformer_engine else find_transformer_engine(find_releases())
    if version:
        from packaging.version import Version  # which Megatron also needs

        # What Megatron's checks of flags ask; otherwise it is that of the installed package, or 0 where there is none.
        vars(import_module("megatron.core.utils"))["_te_version"] = Version(version)
    return version, is_known


def decided_by_checkpoint(line: CommandLine) -> list[str]:
    """The flags whose values the checkpoint replaces and some defect depends on."""
    return list(FROM_CHECKPOINT) if Settings(line.sources, None).use_checkpoint_args else []


def without_effect(line: CommandLine) -> list[str]:
    """The flags of the patches that act on MTP heads only, where these flags give the model none."""
    settings = Settings(line.sources, None)
    if settings.mtp_num_layers or decided_by_checkpoint(line):
        return []
    edits = (edit for patch in CATALOG if not patch.package for edit in patch.edits)
    by_argument = {argument_of(edit): edit for edit in edits if isinstance(edit, (AddField, AddFlag))}
    return [
        flag_of(edit)
        for name, edit in by_argument.items()
        if "mtp" in name and getattr(settings, name) not in (None, edit.default)
    ]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Megatron prints what it sets."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _show(line: CommandLine, findings: list[Finding], transformer_engine: str) -> None:
    say = make_say()
    say(f"{describe_megatron()}\n{transformer_engine}; {line.world_size} rank{'s' * (line.world_size > 1)}")
    if line.environment:
        say(f"assumed in the environment of the run: {' '.join(map('='.join, line.environment.items()))}")
    for hint in line.unknown.hints():
        say(hint, "yellow")
    for flag in without_effect(line):
        say(f"{flag} has no effect: the model has no MTP heads; add --mtp-num-layers", "yellow")
    if decided := decided_by_checkpoint(line):
        say(f"the checkpoint decides {', '.join(decided)} and more: also give them as flags", "yellow")
    for finding in findings:
        say(describe(finding), style_of(finding))
    left = sum(not finding.is_removed for finding in findings)
    total = f"Known defects that affect these flags: {len(findings)}"
    if not findings:
        say("No known defect of this Megatron affects these flags.")
    elif left:
        say(f"{total}; {left} of them the patches do not remove.")
    else:
        say(f"{total}. `import megatron_mtp_patches` removes all of them.")


def describe(finding: Finding) -> str:
    """A finding in a line."""
    removed = f"removed by {finding.patch}" + (f"; {finding.remedy}" if finding.remedy else "")
    answer = removed if finding.is_removed else f"NOT REMOVED: {finding.remedy}"
    condition = f", if {finding.only_if}" if finding.only_if else ""
    sure = {"read": "; read in the source", "reported": "; reported by others"}.get(finding.evidence, "")
    where = f"{finding.releases}{sure}"
    return f"* {finding.id}, severity {finding.severity}: {finding.text}{condition} ({where}): {answer}"


def style_of(finding: Finding) -> str | None:
    """The colour of a finding."""
    return None if finding.is_removed else "red" if finding.severity >= FAILS_FROM else "yellow"
