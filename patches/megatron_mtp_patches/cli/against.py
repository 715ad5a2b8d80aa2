"""The option --against PATH: the Megatron whose sources a command reads."""

from __future__ import annotations

import os
from pathlib import Path

from ..engine import PatchError, UsageError
from ..engine.source import find_file
from ..megatrons.installed import describe_megatron


def read_path(against: str | None) -> list[str] | None:
    """The folders to search: a checkout or site-packages, or several joined as in PATH; None for what is installed.

    Raises:
        PatchError: there is no Megatron.
        UsageError: `against` names no folder, or none with a Megatron.
    """
    path = None if against is None else against.split(os.pathsep)
    for folder in path or ():
        if not Path(folder).is_dir():
            raise UsageError(f"--against {against}: there is no folder {folder!r}")
    if find_file("megatron.core", path) is None:
        if path:
            raise UsageError(f"--against {against}: there is no megatron/core in it")
        raise PatchError(describe_megatron())
    return path
