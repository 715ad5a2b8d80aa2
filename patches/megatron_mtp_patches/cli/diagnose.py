"""`doctor -- FLAGS`: which known defects a command line of Megatron's trainer meets on the installed release."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import math
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any, NamedTuple

from .. import apply, rehearsal
from ..catalog import CATALOG
from ..description import argument_of, flag_of
from ..diagnosis import Finding, Settings, check_version, find_defects
from ..engine import AddField, AddFlag, PatchError, UsageError
from ..engine.source import find_file
from ..installed_megatron import PACKAGES, describe_megatron, find_releases, find_transformer_engine, import_targets
from .console import make_console
from .refusals import flags_left_out, reason

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
OPTIONS = {"--json", "--te", "--world-size"}  # of this command
OF_TORCHRUN = {"--nproc-per-node", "--nproc_per_node", "--nnodes"}


class CommandLine(NamedTuple):
    """A command line as Megatron reads it.

    Attributes:
        sources: the namespaces that have its settings: what validate_args returns and, from --yaml-cfg, its sections.
        unknown: the flags that Megatron does not know; a script may.
        similar: the flag of Megatron that an unknown one is almost the same as.
        world_size: the number of ranks.
    """

    sources: list[object]
    unknown: list[str]
    similar: dict[str, str]
    world_size: int


def diagnose(words: list[str], world_size: int | None, transformer_engine: str | None, as_json: bool) -> int:
    """Print the defects that the command line meets; 1 if the patches do not remove all of them.

    Args:
        words: the flags, as after the name of the script.
        world_size: the number of ranks; None for the smallest that fits.
        transformer_engine: its version; None for the one that is installed, or else that the release was made for.

    Raises:
        PatchError: Megatron is not installed.
        UsageError: `transformer_engine` is not a version, Megatron's trainer is missing, or the flags are refused.
    """
    if transformer_engine is not None:
        try:
            check_version(transformer_engine)
        except ValueError as error:
            raise UsageError(f"--te: {error}") from error
    if world_size is not None and world_size < 1:
        raise UsageError(f"--world-size {world_size}: give a number of ranks")
    if {"--help", "-h"}.intersection(words):
        raise UsageError("Megatron's own flags are listed by your training script with --help")
    if find_file("megatron.core") is None:
        raise PatchError(describe_megatron())
    if find_file("megatron.training.arguments") is None:
        raise UsageError(
            "reading flags needs megatron.training; put a Megatron-LM checkout of this release on PYTHONPATH"
        )
    apply(on_drift="skip")
    with _silence():
        rehearsal.install(megatron_flags=False)
        import_targets()
        line = read([word for word in words if word != "--"], world_size)
    releases = find_releases()
    version, is_known = (transformer_engine, True) if transformer_engine else find_transformer_engine(releases)
    with _refusals():
        findings = list(find_defects(Settings(line.sources, version), releases))
    if as_json:
        print(
            json.dumps(
                {
                    "megatron": describe_megatron(),
                    "transformer_engine": version,
                    "transformer_engine_is_assumed": not is_known,
                    "decided_by_checkpoint": decided_by_checkpoint(line),
                    "world_size": line.world_size,
                    "unknown": line.unknown,
                    "without_effect": without_effect(line),
                    "defects": [dataclasses.asdict(finding) for finding in findings],
                },
                indent=1,
            )
        )
    else:
        origin = "" if is_known else " (not installed; this release was made for it)"
        _show(line, findings, f"TransformerEngine {version}{origin}" if version else "no TransformerEngine")
    return int(not all(finding.is_removed for finding in findings))


def read(words: list[str], world_size: int | None) -> CommandLine:
    """Read the flags with Megatron's parser and let it set the defaults, as at the start of a training.

    Raises:
        UsageError: Megatron's trainer does not import, its parser or validate_args refuses the flags, or the patch of
            a flag is left out or refused.
    """
    try:
        from megatron.training import arguments as megatron
    except Exception as error:  # whatever a broken library raises
        raise UsageError(
            f"reading flags needs megatron.training, which does not import: {_describe_failure(error)}"
        ) from error

    with _refusals(), _as_first_rank(words):
        parser = megatron.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        unknown = [word for word in parser.parse_known_args(words)[1] if word.startswith("-")]
        if left_out := list(flags_left_out(unknown)):
            raise UsageError("\n".join(left_out))
        close = {word: get_close_matches(word, parser._option_string_actions, 1, 0.9) for word in unknown}
        parsed = megatron.parse_args(ignore_unknown_args=True)
        given = Settings(_sections(parsed), None)
        parsed.world_size = ranks = world_size or smallest_world_size(given)
        uses_fsdp = given.use_megatron_fsdp or given.use_torch_fsdp2
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if uses_fsdp else "1"  # what validate_args asks for
        if parsed.yaml_cfg is None:
            arguments = megatron.validate_args(parsed, {})
        else:
            from megatron.training.yaml_arguments import validate_yaml

            arguments = validate_yaml(parsed, {})
        sections = _sections(arguments or parsed)
        fitting = smallest_world_size(Settings(sections, None))
        if world_size and ranks % fitting:
            raise UsageError(f"--world-size {ranks}: the layers of these flags are split over {fitting} ranks")
    similar = {word: flags[0] for word, flags in close.items() if flags}
    return CommandLine(sections, unknown, similar, ranks)


def _describe_failure(error: Exception) -> str:
    """Which module has failed to import, how, and what to do about it."""
    frames = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    module = [name for name in frames if name.partition(".")[0] != "importlib"][-1]
    if isinstance(error, ModuleNotFoundError):
        package = PACKAGES.get(error.name or "", error.name)
        advice = f"pip install {package}; `megatron-mtp-patches doctor` names the packages that it needs"
    else:
        advice = f"install the package of {module} again, or in a version that fits"
    return f"{module} raises {type(error).__name__}: {error} ({advice})"


def decided_by_checkpoint(line: CommandLine) -> list[str]:
    """The flags whose values the checkpoint replaces and some defect depends on."""
    return list(FROM_CHECKPOINT) if Settings(line.sources, None).use_checkpoint_args else []


def without_effect(line: CommandLine) -> list[str]:
    """The flags of the patches that act on MTP heads only, where these flags give the model none."""
    given = Settings(line.sources, None)
    if given.mtp_num_layers or decided_by_checkpoint(line):
        return []
    edits = (edit for patch in CATALOG if not patch.package for edit in patch.edits)
    by_argument = {argument_of(edit): edit for edit in edits if isinstance(edit, (AddField, AddFlag))}
    return [
        flag_of(edit)
        for name, edit in by_argument.items()
        if "mtp" in name and getattr(given, name) not in (None, edit.default)
    ]


def smallest_world_size(settings: Settings) -> int:
    """The smallest number of ranks that dense layers and experts both divide."""
    tensor, pipeline = settings.tensor_model_parallel_size or 1, settings.pipeline_model_parallel_size or 1
    dense = tensor * pipeline * (settings.context_parallel_size or 1)
    experts = (settings.expert_tensor_parallel_size or tensor) * (settings.expert_model_parallel_size or 1)
    return math.lcm(dense, experts * pipeline)


def _sections(arguments: Any) -> list[object]:
    """The arguments, and the sections that a YAML file groups them in."""
    sections = (value for value in vars(arguments).values() if isinstance(value, SimpleNamespace))
    return [arguments, *sections]


@contextlib.contextmanager
def _as_first_rank(words: list[str]) -> Iterator[None]:
    """What Megatron asks the process for: the flags, and its rank."""
    environment, argv = dict(os.environ), sys.argv
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    sys.argv = ["doctor", *words]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= environment
        sys.argv = argv


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn whatever Megatron raises on flags into a UsageError that says it."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as error:
        raise UsageError(f"Megatron's parser: {printed.getvalue().strip().rpartition('error: ')[2]}") from error
    except UsageError:
        raise
    except AttributeError as error:
        if isinstance(error.obj, SimpleNamespace):
            raise UsageError(
                f"the YAML file names no {error.name}: add it, at its top level or in its section"
            ) from error
        raise UsageError(f"Megatron refuses these flags: {error}; an empty YAML file does that, too") from error
    except Exception as error:  # assertions, and whatever else a wrong value leads to
        raise UsageError(f"Megatron refuses these flags: {reason(error)}") from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Megatron prints what it sets."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _show(line: CommandLine, findings: list[Finding], transformer_engine: str) -> None:
    console = make_console()

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    say(f"{describe_megatron()}\n{transformer_engine}; {line.world_size} rank{'s' * (line.world_size > 1)}")
    if line.unknown:
        say(f"unknown to Megatron, ignored: {' '.join(line.unknown)}", "yellow")
    for word, flag in line.similar.items():
        say(f"{word}: did you mean {flag}?", "yellow")
    if OPTIONS.intersection(line.unknown):
        say(f"{', '.join(sorted(OPTIONS))} go before --", "yellow")
    if OF_TORCHRUN.intersection(line.unknown):
        say("the words of torchrun are not read: give --world-size N before --", "yellow")
    for flag in without_effect(line):
        say(f"{flag} has no effect: the model has no MTP heads; add --mtp-num-layers", "yellow")
    if decided := decided_by_checkpoint(line):
        say(f"the checkpoint decides {', '.join(decided)} and more: give them as flags, too", "yellow")
    for finding in findings:
        removed = f"removed by {finding.patch}" + (f"; {finding.remedy}" if finding.remedy else "")
        answer = removed if finding.is_removed else f"NOT REMOVED: {finding.remedy}"
        say(f"* {finding.text} ({finding.releases}): {answer}", None if finding.is_removed else "red")
    left = sum(not finding.is_removed for finding in findings)
    if not findings:
        say("These flags meet no known defect of this release.")
    elif left:
        say(f"{left} of {len(findings)} defects that these flags meet are not removed.")
    else:
        say(f"These flags meet {len(findings)} known defect{'s' * (len(findings) > 1)}; the patches remove all.")
