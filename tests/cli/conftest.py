"""The command, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Several commands in one process, because importing Megatron takes many seconds.
RUN_ALL = """
import contextlib, io, json, sys
from megatron_mtp_patches.cli import main

results = []
for argv in json.loads(sys.argv[1]):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(argv)
    results.append([code, output.getvalue()])
print(json.dumps(results))
"""


@pytest.fixture(scope="session")
def release() -> str:
    return version("megatron-core")


@pytest.fixture(scope="session")
def python():
    """python(*words, first=folder, **environment): run Python on this repository, with `first` first on the path.

    There are no colours, and the terminal is wide enough for any table.
    """

    def run(*words: str, first: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("MEGATRON_MTP_PATCHES")}
        paths = os.pathsep.join(str(path) for path in (first, ROOT / "patches", ROOT) if path)
        mine = {"PYTHONPATH": paths, "COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"}
        return subprocess.run(
            [sys.executable, "-W", "ignore", *words],
            env={**kept, **mine, **environment},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return run


@pytest.fixture(scope="session")
def command(python):
    """command(*words, ...): run `megatron-mtp-patches` with these words."""
    return lambda *words, **settings: python("-m", "megatron_mtp_patches", *words, **settings)


@pytest.fixture(scope="module")
def run_all(python):
    """run_all(argv, argv, ...): [(exit code, output), ...] of several commands in one process."""

    def run(*argvs: list[str], **settings) -> list[tuple[int, str]]:
        done = python("-c", RUN_ALL, json.dumps(argvs), **settings)
        assert done.returncode == 0, done.stderr
        return [tuple(result) for result in json.loads(done.stdout.splitlines()[-1])]

    return run
