"""torch.compile gives what plain Python gives; compiled.py has the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh_process import ROOT, imports_megatron, output_of_python

pytestmark = [
    pytest.mark.forked("python"),
    pytest.mark.real_process("the rehearsal in forks disables torch.compile"),
    imports_megatron,
]
COMPILED = Path(__file__).with_name("compiled.py")


def test_compiled_patched_functions_give_what_plain_ones_give():
    words = ["-q", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    assert "4 passed" in output_of_python("-m", "pytest", *words, str(COMPILED))
