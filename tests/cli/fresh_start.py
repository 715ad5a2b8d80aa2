"""Python as it would start: in a fork of this process, or in a process of its own where the start itself matters."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

from tests.warm.processes import LIMIT, Ended, run_ranks

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = [str(ROOT / "patches"), str(ROOT)]


def run_python(*words: str, first: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python on this repository with these variables, and with `first` first on the path."""
    path = os.pathsep.join(filter(None, [first and str(first), *REPOSITORY, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def run_command(words: list[str], path: list[str], environment: dict[str, str]) -> Ended:
    """Run the script `megatron-mtp-patches` in a fork that finds what is on `path`, and has imported nothing of it."""

    def run() -> None:
        os.environ.update(environment)
        start_over(path)
        sys.argv = ["megatron-mtp-patches", *words]
        from megatron_mtp_patches.cli import main

        sys.exit(main())

    (ended,) = run_ranks(1, run)
    return ended


def start_over(path: list[str]) -> None:
    """Forget every module that is not Python's, and every hook of an import."""
    for name in list(sys.modules):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "__main__"}:
            del sys.modules[name]
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
    sys.path[:] = path
    importlib.invalidate_caches()


def standard_library() -> list[str]:
    """What `python -S` has on its path."""
    base = Path(sys.base_prefix)
    return [folder for folder in sys.path if Path(folder).is_relative_to(base) and "-packages" not in folder]
