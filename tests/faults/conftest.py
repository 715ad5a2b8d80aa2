"""Faults on the real megatron-core: processes in which something goes wrong, and what they report of it.

Importing Megatron takes many seconds, so a process looks at several things, and the processes run side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conformance.conftest import shadow  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = Path(__file__).with_name("scenarios")
PATIENCE = 280


@pytest.fixture(scope="session")
def processes(request):
    """The processes that the tests of this session need, by name, all started at once."""
    names = {item.module.SCENARIO for item in request.session.items if hasattr(item.module, "SCENARIO")}
    started = {name: _start(name, request) for name in sorted(names)}
    yield started
    for process in started.values():
        process.kill()


@pytest.fixture(scope="module")
def found(request, processes):
    """What the scenario of this test's module reports."""
    process = processes[request.module.SCENARIO]
    if not hasattr(process, "report"):
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors[-6000:]
        process.report = json.loads(output.splitlines()[-1])
    return process.report[Path(request.module.__file__).stem.removeprefix("test_")]


def _start(name: str, request: pytest.FixtureRequest) -> subprocess.Popen:
    dropped = ("MEGATRON_MTP_PATCHES", "TORCHDYNAMO_DISABLE", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    folders = [SCENARIOS, ROOT / "tests" / "conformance", ROOT / "patches", ROOT]
    if name == "unpatched":  # may rewrite these sources
        change_nothing = {"megatron.core.optimizer.optimizer": lambda source: source}
        folders.insert(0, request.getfixturevalue("shadow")(change_nothing))
    options = ["-OO"] if name == "optimised" else []
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *options, str(SCENARIOS / f"{name}.py")],
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
