"""`import megatron_mtp_patches` runs in every process of a training image, wanted or not.

What its time stands for is asserted here: what is loaded and read. python -m scripts.bench has the times.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_process("what a bare interpreter loads")
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "patches"), str(ROOT)))}
HEAVY = {"torch", "megatron", "wrapt", "rich", "numpy", "asyncio"}


def test_it_imports_neither_torch_nor_megatron_nor_wrapt_and_reads_no_table():
    code = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
before = set(sys.modules)
import megatron_mtp_patches
print(*set(sys.modules) - before, *(file for file in opened if file.endswith(".json")))
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "megatron_mtp_patches.catalog" in loaded
    assert loaded & HEAVY == set()
    assert not [name for name in loaded if name.startswith("megatron_overrides.") or name.endswith(".json")]
