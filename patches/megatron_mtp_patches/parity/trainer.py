"""Megatron's trainer in a rehearsal, so that it reads flags in this process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import os
import warnings
from collections.abc import Iterator
from importlib import import_module

from .. import apply, rehearsal
from ..doctor import start_line
from ..doctor.findings import check_version
from ..engine import PatchError, UsageError
from ..engine.source import find_file
from ..megatrons.installed import MEGATRON, describe_megatron, find_releases, find_transformer_engine, import_targets


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
