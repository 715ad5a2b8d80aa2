"""Layer 7: a process that a rehearsal starts with multiprocessing ("spawn", "forkserver") is also a rehearsal.

A checkpoint's writer or a DataLoader's worker imports Megatron, and with it TransformerEngine: without the layers it
would look for a GPU and for kernels. multiprocessing sends each new process its preparation data first; unpickling that
data runs child_process.py. A fork is a rehearsal already.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import runpy
import sys
from pathlib import Path
from typing import Any

KEY = "megatron_mtp_patches_rehearsal"


class _Prepare:
    """Pickles as a call of runpy.run_path, because the new process has not imported this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        return runpy.run_path, (str(Path(__file__).with_name("child_process.py")), {"PATH": sys.path})


def install() -> None:
    """Add the layers to the preparation data that multiprocessing sends to a new process."""
    get_preparation_data = multiprocessing.spawn.get_preparation_data

    @functools.wraps(get_preparation_data)
    def with_rehearsal(name: str) -> dict[str, Any]:
        return {KEY: _Prepare(), **get_preparation_data(name)}

    multiprocessing.spawn.get_preparation_data = with_rehearsal
