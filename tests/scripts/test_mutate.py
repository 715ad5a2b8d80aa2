"""scripts/mutate.py: a mutant is what its name says, and one that survives without a reason is an error."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
PRINT_EDITS = """
from megatron_mtp_patches.catalog import BASE, CATALOG
for patch in (*BASE, *CATALOG):
    for edit in patch.edits:
        print(patch.id, edit)
"""
COMPARED = """
def over(norm, limit):
    return limit is not None and 0 < norm <= limit
"""


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from mutation import mutants

    return mutants


def edits_in(folder):
    """What the set declares in this copy of the repository, read by a process of its own."""
    command = [sys.executable, "-c", PRINT_EDITS]
    done = subprocess.run(command, env={"PYTHONPATH": str(folder / "patches")}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_mutant_lacks_one_edit_in_every_patch_that_declares_it(mutants, tmp_path):
    found = mutants.without_edits()
    before = edits_in(ROOT)
    assert sum(len(mutant.dropped) for mutant in found) == len(before)
    assert len({mutant.name for mutant in found}) == len(found)
    shared = next(mutant for mutant in found if "ChainedOptimizer.step " in mutant.name)
    after = edits_in(mutants.copy(shared, tmp_path / "copy"))
    gone = [line for line in before if line not in after]
    assert [line for line in before if line in after] == after
    assert len(gone) == len(shared.dropped) > 1
    assert all("ChainedOptimizer.step'" in line and "step_chained" in line for line in gone)


def test_each_comparison_is_turned_in_each_way_and_nothing_else_is(mutants, tmp_path):
    (tmp_path / "code.py").write_text(COMPARED)
    found = mutants.turned_comparisons(("code.py",), tmp_path)
    bodies = [ast.unparse(ast.parse(mutant.source).body[0].body[0].value) for mutant in found]
    assert bodies == [
        "limit is None and 0 < norm <= limit",
        "limit is not None and 0 >= norm <= limit",
        "limit is not None and 0 <= norm <= limit",
        "limit is not None and 0 < norm > limit",
        "limit is not None and 0 < norm < limit",
    ]
    assert found[0].name == "code.py over: limit is not None -> limit is None"
    assert found[0].where == "code.py:3"


@pytest.mark.parametrize("reason, code", [("because", 0), (None, 1)])
def test_who_survives_has_a_reason_or_the_run_fails(mutants, reason, code, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import mutate
    from rich.console import Console

    killed = {"killed": "tests/a.py::test", "reason": None}
    assert mutate.conclude({"one": killed, "two": {"killed": None, "reason": reason}}, Console(quiet=True)) == code


def test_the_committed_table_has_every_edit_and_no_survivor_without_a_reason(mutants):
    rows = json.loads((ROOT / "ci" / "mutants.json").read_text())
    unseen = [mutant.name for mutant in mutants.without_edits() if mutant.name not in rows]
    assert unseen == [], "run scripts/mutate.py --resume --only NAME"
    assert [name for name, row in rows.items() if row["killed"] is None and not row["reason"]] == []
