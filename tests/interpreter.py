"""Fresh interpreters, for what a fork cannot show: how one starts, or what is imported first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .warm.processes import LAUNCHER, LIMIT

ROOT = Path(__file__).resolve().parents[1]
DROPPED = ("MEGATRON_MTP_PATCHES", "TORCHDYNAMO_DISABLE", "TEST_DEVICE")


def run_python(*words: str) -> str:
    """Run Python with these words, as a user without a launcher would; what it printed. It must end with 0."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith((*DROPPED, *LAUNCHER))}
    environment = {**kept, "PYTHONPATH": f"{ROOT / 'patches'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
