"""Reading a module's source where an import would find it, without importing anything."""

from __future__ import annotations

import ast
import sys

import pytest
from megatron_mtp_patches.engine.source import contains_expression, find_definition, find_file, parse
from megatron_mtp_patches.engine.watch import watch


@pytest.fixture
def two_folders(garden, monkeypatch):
    """A namespace package `estate`: `estate.house` in both folders, `estate.barn` only in the second."""
    first, second = garden.folder.parent / "checkout", garden.folder.parent / "wheel"
    for folder in (first, second):
        (folder / "estate" / "house").mkdir(parents=True)
        (folder / "estate" / "house" / "__init__.py").write_text("")
        (folder / "estate" / "house" / "roof.py").write_text(f"colour = {folder.name!r}\n")
    (second / "estate" / "barn.py").write_text("")
    (second / "estate" / "house" / "cellar.py").write_text("")
    monkeypatch.syspath_prepend(str(second))
    return first, second


def imported():
    return {name for name in sys.modules if name.partition(".")[0] in ("estate", "garden", "field")}


def test_a_checkout_earlier_on_the_path_shadows_the_wheel(two_folders, monkeypatch):
    first, second = two_folders
    assert find_file("estate.house.roof") == second / "estate" / "house" / "roof.py"
    monkeypatch.syspath_prepend(str(first))
    assert find_file("estate.house") == first / "estate" / "house" / "__init__.py"
    assert find_file("estate.house.roof") == first / "estate" / "house" / "roof.py"
    assert find_file("estate.barn") == second / "estate" / "barn.py", "the namespace has both folders"
    assert find_file("estate.house.cellar") is None, "the package that shadows has no such module"
    assert not imported()


def test_it_is_the_file_that_an_import_takes(two_folders, monkeypatch):
    monkeypatch.syspath_prepend(str(two_folders[0]))
    found = find_file("estate.house.roof")
    monkeypatch.delitem(sys.modules, "estate", raising=False)
    import estate.house.roof

    assert str(found) == estate.house.roof.__file__
    assert estate.house.roof.colour == "checkout"


def test_an_imported_module_is_where_it_was_imported_from(two_folders, garden, monkeypatch):
    garden.load("estate.house.roof")
    monkeypatch.syspath_prepend(str(two_folders[0]))
    assert find_file("estate.house.roof") == two_folders[1] / "estate" / "house" / "roof.py"


def test_a_search_path_takes_the_place_of_the_interpreter_s(two_folders, garden):
    first, second = two_folders
    garden.load("estate.house.roof")
    assert find_file("estate.house.roof", [str(first)]) == first / "estate" / "house" / "roof.py"
    assert find_file("estate.barn", [str(first)]) is None
    assert find_file("garden", [str(first)]) is None


@pytest.mark.parametrize("module", ["absent", "absent.deep.down", "garden.absent", "estate", "itertools", "math"])
def test_no_source_is_none(two_folders, module):
    assert find_file(module) is None
    assert parse(module) is None


def test_nothing_is_imported_even_under_import_hooks(garden, monkeypatch):
    from wrapt import importer

    monkeypatch.setattr(importer, "_post_import_hooks", {})
    monkeypatch.setattr(importer, "_post_import_hooks_init", False)
    garden.write("field/__init__.py", "raise AssertionError('imported')")
    garden.write("field/corn.py", "raise AssertionError('imported')")
    importer.register_post_import_hook(print, "field.corn")
    watch(["field", "field.corn"], print)
    assert find_file("field.corn") == garden.folder / "field" / "corn.py"
    assert parse("field.corn") is not None
    assert not imported()


def test_a_changed_file_is_read_again(garden):
    assert find_definition(parse("garden"), "rain") is None
    garden.edit("garden.py", "def water", "def rain")
    assert find_definition(parse("garden"), "rain") is not None


SOURCE = """
import os.path as p, sys
from a import b as c
x = y = 1
z: int = 2
async def co(): pass
class A:
    field: int
    def m(self): "first"
    class B:
        def deep(self): pass
    def m(self): "second"
try:
    import fast
    def f(): return "fast"
except ImportError:
    fast = None
    def f(): return "slow"
else:
    g = 1
finally:
    h = 1
if x:
    def i(): pass
elif y:
    def j(): pass
else:
    def k(): pass
"""


@pytest.mark.parametrize(
    "name",
    ["p", "sys", "c", "x", "y", "z", "co", "A", "A.field", "A.m", "A.B.deep", "fast", "f", "g", "h", "i", "j", "k"],
)
def test_definitions_are_found(name):
    assert find_definition(ast.parse(SOURCE), name) is not None


@pytest.mark.parametrize("name", ["os", "b", "m", "A.deep", "A.B.m", "A.x", "self", "x.y", "co.pass"])
def test_what_is_not_defined_there_is_not_found(name):
    assert find_definition(ast.parse(SOURCE), name) is None


@pytest.mark.parametrize("name, text", [("A.m", "second"), ("f", "slow")])
def test_the_last_definition_wins(name, text):
    assert text in ast.dump(find_definition(ast.parse(SOURCE), name))


def test_expressions_are_found_whatever_their_layout():
    tree = ast.parse("def f(a):\n    return g(  a or\n h(a, 'b')  )")
    assert contains_expression(tree, 'a or h(a, "b")')
    assert contains_expression(tree, "h")
    assert not contains_expression(tree, "a or h(a)")
