"""scripts/mutate.py: a mutant is what its name says, and one that survives without a reason is an error."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
COMPARED = """
def over(norm, limit):
    return limit is not None and 0 < norm <= limit
"""


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from mutation import mutants

    return mutants


def test_a_mutant_lacks_one_edit_in_every_patch_that_declares_it(mutants, monkeypatch):
    import megatron_mtp_patches
    from megatron_mtp_patches import _engine, catalog
    from mutation import change

    def edits():
        return [(patch.id, edit) for patch in (*catalog.BASE, *catalog.CATALOG) for edit in patch.edits]

    found = mutants.without_edits()
    before = edits()
    assert sum(len(mutant.dropped) for mutant in found) == len(before)
    assert len({mutant.name for mutant in found}) == len(found)
    shared = next(mutant for mutant in found if "ChainedOptimizer.step " in mutant.name)
    for owner in (catalog, _engine):
        for name in vars(owner).keys() & {"CATALOG", "BASE", "catalog", "base"}:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    change.leave_out(set(shared.dropped))
    after = edits()
    gone = [edit for edit in before if edit not in after]
    assert [edit for edit in before if edit in after] == after
    assert len(gone) == len(shared.dropped) > 1
    assert {edit.target.partition(":")[2] for _, edit in gone} == {"ChainedOptimizer.step"}
    assert _engine.catalog is catalog.CATALOG and megatron_mtp_patches.catalog is catalog


def test_a_comparison_is_turned_in_the_module_that_is_imported(mutants, monkeypatch, tmp_path):
    from mutation import change

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    file = tmp_path / "is_over.py"
    file.write_text("def over(norm): return norm > 1")
    change.change({"dropped": [], "module": "is_over", "file": str(file), "source": "def over(norm): return norm < 1"})
    import is_over

    assert is_over.over(0) and not is_over.over(2)


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
