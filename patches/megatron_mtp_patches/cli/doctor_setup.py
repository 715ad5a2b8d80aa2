"""What `doctor` does for flags and for files alike: Megatron in a rehearsal, the exit code, and a line a defect."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module

from .. import apply, rehearsal
from ..doctor import start_line
from ..doctor.findings import Finding, check_version
from ..engine import PatchError, UsageError
from ..engine.source import find_file
from ..megatrons.installed import MEGATRON, describe_megatron, find_releases, find_transformer_engine, import_targets

FAILS_FROM = 3  # the severity of a defect from which on the command ends with 1


def prepare(world_size: int | None, transformer_engine: str | None) -> tuple[str | None, bool]:
    """Begin a rehearsal; the version of TransformerEngine, and whether it is more than assumed.

    Raises:
        PatchError: Megatron is not installed.
        UsageError: no run has so many ranks, or `transformer_engine` is not a version.
    """
    if world_size is not None and world_size < 1:
        raise UsageError(f"--world-size {world_size}: give a number of ranks")
    if transformer_engine is not None:
        try:
            check_version(transformer_engine)
        except ValueError as error:
            raise UsageError(f"--te: {error}") from error
    if find_file("megatron.core") is None:
        raise PatchError(describe_megatron())
    apply(on_drift="skip")
    with silence():
        rehearsal.install(megatron_flags=False)
    return (transformer_engine, True) if transformer_engine else find_transformer_engine(find_releases())


def import_trainer(version: str | None) -> None:
    """Import Megatron's trainer, which reads flags, as with this version of TransformerEngine.

    Raises:
        UsageError: Megatron's trainer is missing.
    """
    if find_file("megatron.training.arguments") is None:
        raise UsageError(
            "reading flags needs megatron.training; put a Megatron-LM checkout of this release on PYTHONPATH"
        )
    os.environ[start_line.VARIABLE] = "off"  # reading flags would print the line of a training's start
    if not hasattr(inspect.getsource, "cache_info"):
        # For each parser Megatron reads the help of its flags from the sources of its configurations: half of the time.
        vars(inspect)["getsource"] = functools.cache(inspect.getsource)
    with silence():
        import_targets(MEGATRON)
    if version:
        from packaging.version import Version  # which Megatron also needs

        # What Megatron's checks of flags ask; otherwise it is that of the installed package, or 0 where there is none.
        vars(import_module("megatron.core.utils"))["_te_version"] = Version(version)


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


def is_severe(finding: Finding) -> bool:
    return finding.severity >= FAILS_FROM and not finding.is_removed


def exit_code(findings: Iterable[Finding], is_doubtful: object) -> int:
    return 1 if any(map(is_severe, findings)) else UsageError.exit_code if is_doubtful else 0


def show_findings(show: Callable[..., None], findings: Iterable[Finding]) -> None:
    """A line for each, coloured by what is left to do."""
    for finding in findings:
        removed = f"removed by {finding.patch}" + (f"; {finding.remedy}" if finding.remedy else "")
        answer = removed if finding.is_removed else f"NOT REMOVED: {finding.remedy}"
        condition = f", if {finding.only_if}" if finding.only_if else ""
        sure = {"read": "; read in the source", "reported": "; reported by others"}.get(finding.evidence, "")
        text = f"* {finding.id}, severity {finding.severity}: {finding.text}{condition} ({finding.releases}{sure})"
        show(f"{text}: {answer}", None if finding.is_removed else "red" if is_severe(finding) else "yellow")
