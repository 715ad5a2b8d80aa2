"""python -OO leaves out assertions and docstrings; the patches need neither."""

from __future__ import annotations

import json

import pytest
from megatron_mtp_patches.catalog import CATALOG

from tests.fresh_process import imports_megatron, output_of_python

pytestmark = [
    pytest.mark.forked("python"),
    pytest.mark.real_process("python -OO is asked for when an interpreter starts"),
    imports_megatron,
]

EMERGING = "keep-newton-schulz-scale-invariant"
# emerging_optimizers edits one of its own docstrings, so it cannot be imported; Megatron does without it.
SCRIPT = f"""
import contextlib, importlib.metadata, io, json, sys

version = importlib.metadata.version
def hide(name):
    if name == "emerging-optimizers":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = hide
sys.modules["emerging_optimizers"] = None

from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.cli import main
from megatron_mtp_patches.cli.parser import make_parser
from megatron_mtp_patches.megatrons.installed import import_targets
from tests.conformance.expected import STATE
from tests.conformance.inspection import problems, reports

failures = import_targets()
states = reports()
explained = io.StringIO()
with contextlib.redirect_stdout(explained):
    code = main(["explain", CATALOG[0].id])
print(json.dumps({{
    "docstring": sys.modules[main.__module__].__doc__,
    "not imported": list(failures),
    "problems": {{
        patch.id: problems(patch, states[patch.id], STATE[patch.id]) for patch in CATALOG if patch.id != "{EMERGING}"
    }},
    "emerging": states["{EMERGING}"].state,
    "summaries": {{report.id: report.summary for report in states.values()}},
    "explained": [code, explained.getvalue()],
    "help": make_parser().format_help(),
}}))
"""


@pytest.fixture(scope="module")
def imported():
    """What such a process sees of the patches."""
    return json.loads(output_of_python("-OO", "-c", SCRIPT).splitlines()[-1])


def test_every_patch_is_applied_exactly_once(imported):
    assert imported["docstring"] is None, "this was no python -OO"
    assert {module.partition(".")[0] for module in imported["not imported"]} <= {"emerging_optimizers"}
    assert imported["problems"] and [problem for some in imported["problems"].values() for problem in some] == []
    assert imported["emerging"] == "pending"


def test_the_commands_do_without_docstrings(imported):
    assert imported["summaries"] == {patch.id: patch.summary for patch in CATALOG}
    code, text = imported["explained"]
    assert code == 0 and CATALOG[0].problem in " ".join(text.split())
    assert "status" in imported["help"]
