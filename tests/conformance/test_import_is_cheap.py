"""`import megatron_mtp_patches` runs in every process of a training image, wanted or not; `apply()` in every rank.

What their time stands for is asserted here: what is loaded, read, parsed and scanned. scripts/bench.py has the times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_mtp_patches.catalog import CATALOG

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "patches"), str(ROOT)))}
HEAVY = {"torch", "megatron", "megatron_overrides", "wrapt", "rich", "numpy", "asyncio"}


def test_it_imports_neither_torch_nor_megatron_nor_wrapt():
    code = "import sys; before = set(sys.modules); import megatron_mtp_patches; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "megatron_mtp_patches.catalog" in loaded
    assert loaded & HEAVY == set()


# What is needed only once there is a module to patch, and may cost more than all that the import may.
LATE = {"json", "hashlib", "typing", "importlib.metadata", "megatron_mtp_patches.engine.installer"}


def test_it_loads_nothing_that_is_needed_only_to_patch_and_reads_no_table():
    """-S: the packages of the environment may load the same as they start."""
    code = """
import sys
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
before = set(sys.modules)
import megatron_mtp_patches
print(*set(sys.modules) - before, *(file for file in opened if file.endswith(".json")))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    found = set(done.stdout.split())
    assert "megatron_mtp_patches.engine.engine" in found
    assert found & LATE == set()
    assert not [word for word in found if word.endswith(".json")]


APPLY = """
import contextlib, importlib, json, os, sys
from collections import Counter
from types import SimpleNamespace

choice = os.environ.pop("MEGATRON_MTP_PATCHES")
os.environ["MEGATRON_MTP_PATCHES"] = "none"
import megatron_mtp_patches
from megatron_mtp_patches import _engine
from megatron_mtp_patches.engine.source import find_file
megatron_mtp_patches.revert()
for module in _engine.modules:
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
sources = {str(find_file(module)): module for module in _engine.modules if find_file(module)}
counts = {"open": Counter(), "compile": Counter()}
scans = []

class Modules:
    def items(self):
        scans.append(1)
        return sys.modules.items()

from megatron_mtp_patches.engine import copies
copies.sys = SimpleNamespace(modules=Modules())

def hear(event, arguments):
    if event in counts:
        file = str(arguments[event == "compile"])
        if file in sources:
            counts[event][sources[file]] += 1

sys.addaudithook(hear)
megatron_mtp_patches.apply(choice)
applied = len(scans)
report = {patch.id: patch.state for patch in megatron_mtp_patches.status()}
megatron_mtp_patches.record()
megatron_mtp_patches.revert()
print(json.dumps({**counts, "scans": applied, "scans of all": len(scans), "states": report}))
"""


@pytest.fixture(scope="module")
def cost():
    """cost(choice): what apply() does where all of Megatron is imported."""

    def run(choice):
        environment = {**ENVIRONMENT, "MEGATRON_MTP_PATCHES": choice}
        command = [sys.executable, "-W", "ignore", "-c", APPLY]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_apply_reads_each_source_once_parses_none_and_scans_once(cost):
    found = cost("all")
    assert "applied" in found["states"].values()
    assert set(found["open"].values()) == {1} and len(found["open"]) > 10
    assert found["compile"] == {}, "a known release is not parsed"
    assert found["scans"] == 1 and found["scans of all"] == 2, "apply, and revert"


def test_nothing_is_read_where_every_patch_is_left_out(cost):
    found = cost("none")
    assert set(found["states"].values()) == {"disabled"}
    assert found["open"] == found["compile"] == {}


@pytest.mark.parametrize("words", ["typo", "-typo"])
def test_an_unknown_patch_in_the_environment_is_an_error_that_lists_the_ids(words):
    environment = {**ENVIRONMENT, "MEGATRON_MTP_PATCHES": words}
    code = "import megatron_mtp_patches"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "PatchError: unknown patch" in last and repr(words) in last
    assert all(patch.id in last for patch in CATALOG)
