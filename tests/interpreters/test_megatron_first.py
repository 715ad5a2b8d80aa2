"""`import megatron_mtp_patches` in a process that has imported Megatron: every fork has imported the package before."""

from __future__ import annotations

import pytest
from megatron_mtp_patches.applied import ENGINE
from megatron_mtp_patches.engine.source import find_file

from tests.fresh_process import imports_megatron, output_of_python

pytestmark = [
    pytest.mark.forked("python"),
    pytest.mark.real_process("imports the package, which every fork has done already"),
    imports_megatron,
]
SCRIPT = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
assert "megatron_mtp_patches" not in sys.modules
import megatron_mtp_patches
from tests.conformance.expected import CATALOG, STATE
from tests.conformance.inspection import problems, reports
states = reports()
assert [problem for patch in CATALOG for problem in problems(patch, states[patch.id], STATE[patch.id])] == []
"""


def test_importing_the_package_after_megatron_applies_the_patches():
    output_of_python("-c", SCRIPT, *(module for module in ENGINE.modules if find_file(module)))
