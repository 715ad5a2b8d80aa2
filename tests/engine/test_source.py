"""Reading a module's source where an import would find it, without importing anything."""

from __future__ import annotations

import ast
import sys

import pytest
from megatron_mtp_patches.engine.import_hook import on_import
from megatron_mtp_patches.engine.source import contains_expression, find_definition, find_file, first_lines


@pytest.fixture
def two_folders(library, monkeypatch):
    """A namespace package `pkg`: `pkg.sub` in both folders, `pkg.only_in_wheel` only in the second."""
    first, second = library.folder.parent / "checkout", library.folder.parent / "wheel"
    for folder in (first, second):
        (folder / "pkg" / "sub").mkdir(parents=True)
        (folder / "pkg" / "sub" / "__init__.py").write_text("")
        (folder / "pkg" / "sub" / "mod.py").write_text(f"origin = {folder.name!r}\n")
    (second / "pkg" / "only_in_wheel.py").write_text("")
    (second / "pkg" / "sub" / "absent_in_checkout.py").write_text("")
    monkeypatch.syspath_prepend(str(second))
    return first, second


def imported():
    return {name for name in sys.modules if name.partition(".")[0] in ("pkg", "lib", "pkg2")}


def test_a_checkout_earlier_on_the_path_shadows_the_wheel(two_folders, monkeypatch):
    first, second = two_folders
    assert find_file("pkg.sub.mod") == second / "pkg" / "sub" / "mod.py"
    monkeypatch.syspath_prepend(str(first))
    assert find_file("pkg.sub") == first / "pkg" / "sub" / "__init__.py"
    assert find_file("pkg.sub.mod") == first / "pkg" / "sub" / "mod.py"
    assert find_file("pkg.only_in_wheel") == second / "pkg" / "only_in_wheel.py", "the namespace has both folders"
    assert find_file("pkg.sub.absent_in_checkout") is None, "the package that shadows has no such module"
    assert not imported()


def test_an_imported_module_is_where_it_was_imported_from(two_folders, library, monkeypatch):
    library.load("pkg.sub.mod")
    monkeypatch.syspath_prepend(str(two_folders[0]))
    assert find_file("pkg.sub.mod") == two_folders[1] / "pkg" / "sub" / "mod.py"


def test_a_search_path_replaces_the_interpreter_s(two_folders, library):
    first, second = two_folders
    library.load("pkg.sub.mod")
    assert find_file("pkg.sub.mod", [str(first)]) == first / "pkg" / "sub" / "mod.py"
    assert find_file("pkg.only_in_wheel", [str(first)]) is None
    assert find_file("lib", [str(first)]) is None


def test_a_namespace_inside_a_package_that_is_not_imported_is_found(two_folders, monkeypatch):
    (two_folders[0] / "pkg" / "sub" / "namespace").mkdir()
    file = two_folders[0] / "pkg" / "sub" / "namespace" / "mod.py"
    file.write_text("")
    monkeypatch.syspath_prepend(str(two_folders[0]))
    assert find_file("pkg.sub.namespace.mod") == find_file("pkg.sub.namespace.mod", [str(two_folders[0])]) == file
    assert find_file("pkg.sub.namespace") is None
    assert not imported()


@pytest.mark.parametrize("module", ["absent", "absent.deep.down", "lib.absent", "pkg", "itertools", "math"])
def test_a_module_without_source_is_none(two_folders, module):
    assert find_file(module) is None


def test_nothing_is_imported_even_under_import_hooks(library, monkeypatch):
    from wrapt import importer

    monkeypatch.setattr(importer, "_post_import_hooks", {})
    monkeypatch.setattr(importer, "_post_import_hooks_init", False)
    library.write("pkg2/__init__.py", "raise AssertionError('imported')")
    library.write("pkg2/mod.py", "raise AssertionError('imported')")
    importer.register_post_import_hook(print, "pkg2.mod")
    on_import(["pkg2", "pkg2.mod"], print)
    assert find_file("pkg2.mod") == library.folder / "pkg2" / "mod.py"
    assert not imported()


SOURCE = """
import os.path as p, sys
from a import b as c
x = y = 1
z: int = 2
async def co(): pass
class A:
    pkg2: int
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
    ["p", "sys", "c", "x", "y", "z", "co", "A", "A.pkg2", "A.m", "A.B.deep", "fast", "f", "g", "h", "i", "j", "k"],
)
def test_definitions_are_found(name):
    assert find_definition(ast.parse(SOURCE), name) is not None


@pytest.mark.parametrize("name", ["os", "b", "m", "A.deep", "A.B.m", "A.x", "self", "x.y", "co.pass"])
def test_other_names_are_not_found(name):
    assert find_definition(ast.parse(SOURCE), name) is None


@pytest.mark.parametrize("name, text", [("A.m", "second"), ("f", "slow")])
def test_the_last_definition_wins(name, text):
    assert text in ast.dump(find_definition(ast.parse(SOURCE), name))


def test_expressions_are_found_whatever_their_layout():
    cls = ast.parse("def f(a):\n    return g(  a or\n h(a, 'b')  )")
    assert contains_expression(cls, 'a or h(a, "b")')
    assert contains_expression(cls, "h")
    assert not contains_expression(cls, "a or h(a)")


EVERY_BLOCK = """
def f(): pass  # begins
class C:
    @property  # begins
    @staticmethod
    def f(): pass
try:
    def f(): pass  # begins
except Exception:
    async def f(): pass  # begins
else:
    def f(): pass  # begins
finally:
    def f(): pass  # begins
while x:
    def f(): pass  # begins
with x:
    def f(): pass  # begins
for x in y:
    def f():  # begins
        def f(): pass  # begins
match x:
    case 1:
        if y:
            def f(): pass  # begins
"""


def test_functions_are_found_wherever_statements_are():
    """A function begins with its first decorator."""
    begins = [number for number, line in enumerate(EVERY_BLOCK.splitlines(), 1) if "# begins" in line]
    lines = first_lines(ast.parse(EVERY_BLOCK))
    assert (list(lines), sorted(lines["f"])) == (["f"], begins)
