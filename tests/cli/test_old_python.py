"""A Python that pip would refuse finds the package by PYTHONPATH, and is told which it needs."""

import ast

import pytest

from .fresh_start import ROOT, run_python


def test_the_file_that_says_it_parses_in_an_older_python():
    file = ROOT / "patches/megatron_mtp_patches/__init__.py"
    ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 7))


@pytest.mark.real_process("the import of the package, in a Python that takes itself for an older one")
def test_an_older_python_is_named_with_the_one_that_is_needed():
    done = run_python("-S", "-c", "import sys; sys.version_info = (3, 9, 18); import megatron_mtp_patches")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: megatron_mtp_patches needs Python >= 3.10; this is ")
