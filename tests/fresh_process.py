"""Fresh interpreters, for what a fork cannot show: how one starts, or what is imported first."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from .warm.processes import LAUNCHER, LIMIT

ROOT = Path(__file__).resolve().parents[1]
DROPPED = ("MEGATRON_MTP_PATCHES", "TORCHDYNAMO_DISABLE", "TEST_DEVICE")

imports_megatron = pytest.mark.skipif(
    find_spec("transformer_engine") is not None and find_spec("transformer_engine_torch") is None,
    reason="beside a TransformerEngine without its extension Megatron can be imported in a rehearsal alone",
)


def output_of_python(*words: str) -> str:
    """Run Python with these words, as a user without a launcher would; what it printed. It must end with 0."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*DROPPED, *LAUNCHER))}
    path = os.pathsep.join(filter(None, [str(ROOT / "patches"), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
