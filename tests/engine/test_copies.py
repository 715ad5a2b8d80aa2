"""Copies made by `from x import y` follow what takes the place of y, in one scan of the modules."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.engine import PatchError, Replace, Wrap, copies

WATER = Replace("garden:water", "ours:water")
PARSER = Wrap("garden:make_parser", "ours:loudly", any_source=True)
GROW = Wrap("garden:Tree.grow", "ours:loudly")
TOOL = Replace("shed:tool", "ours:bloom")


@pytest.fixture
def user(garden):
    """A module with copies, one of them under another name."""
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    garden.write("user.py", "from garden import make_parser, water as pour\nfrom shed import tool\nother = pour\n")
    return garden.load("user")


@pytest.fixture
def scans(monkeypatch):
    """A list that grows with each scan of all modules."""
    found = []

    class Modules(dict):
        def items(self):
            found.append("scan")
            return sys.modules.items()

    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules=Modules()))
    return found


def test_one_scan_for_all_that_is_imported_already(garden, user, scans):
    engine = garden.engine(garden.patch(WATER, PARSER, id="one"), garden.patch(WATER, GROW, TOOL, id="two"))
    module, original = garden.load(), garden.load().water
    engine.apply("all", "raise")
    assert scans == ["scan"]
    assert (user.pour(1), user.other(1), user.tool(1)) == ("our 1", "our 1", "bloomed")
    assert user.make_parser is module.make_parser
    scans.clear()
    engine.revert()
    assert scans == ["scan"]
    assert user.pour is user.other is module.water is original and user.tool() == "spade"


def test_one_scan_for_each_module_that_arrives(garden, scans):
    garden.write("shed.py", "def tool():\n    return 'spade'\n")
    engine = garden.engine(garden.patch(WATER, PARSER, GROW, TOOL))
    engine.apply("all", "raise")
    assert scans == []
    garden.load()
    assert scans == ["scan"]
    garden.load("shed")
    assert scans == ["scan", "scan"]


def test_no_scan_where_no_name_of_a_module_is_replaced(garden, scans):
    engine = garden.engine(garden.patch(GROW))
    garden.load()
    engine.apply("all", "raise")
    engine.revert()
    assert scans == []


def test_an_override_that_imports_patched_modules_adds_no_scan(garden, user, scans):
    garden.write("soil.py", "def dig():\n    return 'hole'\n")
    garden.write("our_soil.py", "def dig():\n    return 'deep hole'\n")
    garden.write("our_shed.py", "import soil\ndef tool():\n    return soil.dig()\n")
    edits = Replace("shed:tool", "our_shed:tool"), Replace("soil:dig", "our_soil:dig")
    engine = garden.engine(garden.patch(WATER, *edits))
    engine.apply("all", "raise")
    assert scans == ["scan"]
    assert (user.tool(), user.pour(1)) == ("deep hole", "our 1")


def test_a_copy_that_is_a_target_itself_is_patched_on_top(garden, user):
    engine = garden.engine(garden.patch(WATER, Wrap("user:pour", "ours:loudly", any_source=True)))
    engine.apply("all", "raise")
    assert user.pour(1) == "our 1!"


def test_the_module_of_an_override_keeps_the_original_under_its_own_name(garden, user):
    garden.write("our_water.py", "from garden import water as upstream\ndef water(litres):\n    return upstream(9)\n")
    edits = Wrap("garden:water", "ours:loudly"), Replace("garden:water", "our_water:water")
    engine = garden.engine(garden.patch(*edits))
    engine.apply("all", "raise")
    assert user.pour(1) == "poured 9!"
    engine.revert()
    assert user.pour(1) == "poured 1"


class Closed(types.ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError("closed")


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("first", [True, False], ids=["before the copies", "after the copies"])
def test_where_a_module_cannot_be_scanned_patches_with_copies_are_withdrawn(garden, user, monkeypatch, first, policy):
    closed = {"closed": Closed("closed")}
    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules=closed | sys.modules if first else sys.modules | closed))
    engine = garden.engine(garden.patch(WATER, GROW, id="copied"), garden.patch(GROW, id="method"))
    if policy == "raise":
        with pytest.raises(PatchError, match="copied is refused: the copies of garden:water: .*closed"):
            engine.apply("all", policy)
    else:
        engine.apply("all", policy)
        assert [engine.installer.report(patch).state for patch in engine.catalog] == ["refused", "applied"]
    assert (user.pour(1), garden.load().water(1)) == ("poured 1", "poured 1")
    assert garden.load().Tree().grow() == ("grew 1!" if policy == "skip" else "grew 1")


def test_an_arriving_module_whose_copies_cannot_follow_is_refused(garden, monkeypatch):
    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules={"closed": Closed("closed")}))
    engine = garden.engine(garden.patch(WATER, GROW))
    engine.apply("all", "raise")
    with pytest.raises(PatchError, match="a-patch is refused: the copies of garden:water"):
        garden.load()
    assert "garden" not in sys.modules


def test_a_revert_reaches_the_modules_behind_one_that_cannot_be_scanned(garden, user, monkeypatch):
    engine = garden.applied(WATER)
    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules={"closed": Closed("closed")} | sys.modules))
    with pytest.raises(RuntimeError, match="closed"):
        engine.revert()
    assert (user.pour(1), garden.load().water(1), engine.active) == ("poured 1", "poured 1", False)


# -- what has taken the place of what -----------------------------------------------------------------------------


def follow(monkeypatch, moves, *modules):
    collected = copies.Copies()
    for old, new in moves:
        collected.move(old, new, "a:b", {"keeper"})
    named = {module.__name__: module for module in modules}
    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules=named))
    collected.follow_all()
    assert collected.places == []


def test_copies_of_whatever_was_there_get_what_is_there_last(monkeypatch):
    first, second, third, alien = (lambda number=number: number for number in range(4))
    for moves in ([(first, second), (second, third)], [(second, third), (first, second), (second, third)]):
        module, keeper = types.ModuleType("module"), types.ModuleType("keeper")
        for there in (module, keeper):
            vars(there).update(a=first, b=second, c=third, d=alien, e=None)
        follow(monkeypatch, moves, module, keeper)
        assert (module.a, module.b, module.c, module.d, module.e) == (third, third, third, alien, None)
        assert (keeper.a, keeper.b, keeper.c) == (first, second, third)


def test_what_comes_back_stays(monkeypatch):
    first, second = (lambda number=number: number for number in range(2))
    module = types.ModuleType("module")
    vars(module).update(a=first, b=second)
    follow(monkeypatch, [(first, second), (second, first)], module)
    assert module.a is module.b is first
