"""Copies made by `from x import y` follow what takes the place of y, in one scan of the modules."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.engine import Override, PatchError, Wrap, copies

REPLACE_F = Override("lib:f", "overrides:f")
PARSER = Wrap("lib:make_parser", "overrides:add_mark", check_source=False)
METHOD = Wrap("lib:C.method", "overrides:add_mark")
G = Override("lib2:g", "overrides:new_method")


@pytest.fixture
def user(library):
    """A module with copies, one of them under another name."""
    library.write("user.py", "from lib import make_parser, f as copy_of_f\nfrom lib2 import g\nother = copy_of_f\n")
    return library.load("user")


@pytest.fixture
def scans(monkeypatch):
    """A list that grows with each scan of all modules."""
    past_scans = []

    class Modules(dict):
        def items(self):
            past_scans.append("scan")
            return sys.modules.items()

    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules=Modules()))
    return past_scans


def test_one_scan_serves_all_modules_that_are_imported_already(library, user, scans):
    engine = library.engine(library.patch(REPLACE_F, PARSER, id="one"), library.patch(REPLACE_F, METHOD, G, id="two"))
    module, original = library.load(), library.load().f
    engine.apply("all", "raise")
    assert scans == ["scan"]
    assert (user.copy_of_f(1), user.other(1), user.g(1)) == ("override 1", "override 1", "new")
    assert user.make_parser is module.make_parser
    scans.clear()
    engine.revert()
    assert scans == ["scan"]
    assert user.copy_of_f is user.other is module.f is original and user.g() == "g"


def test_each_later_import_takes_one_scan(library, scans):
    engine = library.engine(library.patch(REPLACE_F, PARSER, METHOD, G))
    engine.apply("all", "raise")
    assert scans == []
    library.load()
    assert scans == ["scan"]
    library.load("lib2")
    assert scans == ["scan", "scan"]


def test_a_patched_method_needs_no_scan(library, scans):
    engine = library.engine(library.patch(METHOD))
    library.load()
    engine.apply("all", "raise")
    engine.revert()
    assert scans == []


def test_an_override_that_imports_patched_modules_adds_no_scan(library, user, scans):
    library.write("lib_b.py", "def b():\n    return 'b'\n")
    library.write("overrides_b.py", "def b():\n    return 'override b'\n")
    library.write("overrides_lib2.py", "import lib_b\ndef g():\n    return lib_b.b()\n")
    edits = Override("lib2:g", "overrides_lib2:g"), Override("lib_b:b", "overrides_b:b")
    engine = library.engine(library.patch(REPLACE_F, *edits))
    engine.apply("all", "raise")
    assert scans == ["scan"]
    assert (user.g(), user.copy_of_f(1)) == ("override b", "override 1")


def test_a_copy_that_is_a_target_itself_gets_both_edits(library, user):
    engine = library.engine(library.patch(REPLACE_F, Wrap("user:copy_of_f", "overrides:add_mark", check_source=False)))
    engine.apply("all", "raise")
    assert user.copy_of_f(1) == "override 1!"


def test_the_module_of_an_override_keeps_the_original_under_its_own_name(library, user):
    library.write("overrides_f.py", "from lib import f as upstream\ndef f(x):\n    return upstream(9)\n")
    edits = Wrap("lib:f", "overrides:add_mark"), Override("lib:f", "overrides_f:f")
    engine = library.engine(library.patch(*edits))
    engine.apply("all", "raise")
    assert user.copy_of_f(1) == "original 9!"
    engine.revert()
    assert user.copy_of_f(1) == "original 1"


class Closed(types.ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError("closed")


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("first", [True, False], ids=["before the copies", "after the copies"])
def test_patches_with_copies_are_refused_where_a_module_cannot_be_scanned(library, user, monkeypatch, first, policy):
    closed = {"closed": Closed("closed")}
    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules=closed | sys.modules if first else sys.modules | closed))
    engine = library.engine(library.patch(REPLACE_F, METHOD, id="copied"), library.patch(METHOD, id="method"))
    if policy == "raise":
        with pytest.raises(PatchError, match="copied is refused: the copies of lib:f: .*closed"):
            engine.apply("all", policy)
    else:
        engine.apply("all", policy)
        assert [engine.report(patch).state for patch in engine.catalog] == ["refused", "applied"]
    assert (user.copy_of_f(1), library.load().f(1)) == ("original 1", "original 1")
    assert library.load().C().method() == ("method 1!" if policy == "skip" else "method 1")


def test_the_import_fails_where_copies_cannot_be_rebound(library, monkeypatch):
    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules={"closed": Closed("closed")}))
    engine = library.engine(library.patch(REPLACE_F, METHOD))
    engine.apply("all", "raise")
    with pytest.raises(PatchError, match="a-patch is refused: the copies of lib:f"):
        library.load()
    assert "lib" not in sys.modules


def test_a_revert_reaches_the_modules_behind_one_that_cannot_be_scanned(library, user, monkeypatch):
    engine = library.applied(REPLACE_F)
    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules={"closed": Closed("closed")} | sys.modules))
    with pytest.raises(RuntimeError, match="closed"):
        engine.revert()
    assert (user.copy_of_f(1), library.load().f(1), engine.is_active) == ("original 1", "original 1", False)


# -- what has taken the place of what -----------------------------------------------------------------------------


def follow(monkeypatch, moves, *modules):
    collected = copies.Copies()
    for old, new in moves:
        collected.move(old, new, "a:b", {"keeper"})
    named = {module.__name__: module for module in modules}
    monkeypatch.setattr(copies, "sys", SimpleNamespace(modules=named))
    collected.follow_all()
    assert collected.places == []


def test_copies_of_every_earlier_value_become_the_last(monkeypatch):
    first, second, third, alien = (lambda number=number: number for number in range(4))
    for moves in ([(first, second), (second, third)], [(second, third), (first, second), (second, third)]):
        module, keeper = types.ModuleType("module"), types.ModuleType("keeper")
        for there in (module, keeper):
            vars(there).update(a=first, b=second, c=third, d=alien, e=None)
        follow(monkeypatch, moves, module, keeper)
        assert (module.a, module.b, module.c, module.d, module.e) == (third, third, third, alien, None)
        assert (keeper.a, keeper.b, keeper.c) == (first, second, third)


def test_a_value_that_was_replaced_and_restored_is_kept(monkeypatch):
    first, second = (lambda number=number: number for number in range(2))
    module = types.ModuleType("module")
    vars(module).update(a=first, b=second)
    follow(monkeypatch, [(first, second), (second, first)], module)
    assert module.a is module.b is first
