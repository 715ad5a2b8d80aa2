"""The files of an id: declaration, defects, programs, override modules, page; in a clone, tests.

A test says which patches it guards by `pytest.mark.guards("ID", ...)`: in the `pytestmark` of its file or above itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ..catalog import CATALOG
from ..defects.catalog import PACKAGE, defect_modules, removed_by, remover_of
from ..defects.declare import Defect
from ..engine import Patch
from ..reproductions.runner import program_file

CLONE = PACKAGE.parents[1]
TESTS = CLONE / "tests"
IS_CLONE = (TESTS / "conformance").is_dir()  # an installed package comes without them
_PROGRAMS = "tests/reproductions/test_programs.py"  # which runs the program of each defect


def places_of(named: Patch | Defect) -> dict[str, list[str]]:
    """Return {kind of place: ids, modules or files}; an empty list where there is none of a kind."""
    if isinstance(named, Patch):
        defects, patches = removed_by(named), [named]
        ids, declaration = {"defects": [defect.id for defect in defects]}, declaration_of(named.id)
    else:
        defects, patches = [named], [patch for patch in [remover_of(named, CATALOG)] if patch]
        ids = {"patch": [patch.id for patch in patches]}
        declaration = next(Path(str(one.__file__)) for one in defect_modules() if named in one.DEFECTS)
    programs = [file for defect in defects if (file := program_file(defect.id))]
    guards = read_guards(TESTS)
    tests = [test for patch in patches for test in guards.get(patch.id, [])] + [_PROGRAMS] * bool(programs)
    pages = [f"docs/{declaration_of(patch.id).parent.name}.md#{patch.id}" for patch in patches]
    return {
        **ids,
        "declaration": [_relative(declaration)],
        "programs": list(map(_relative, programs)),
        "overrides": sorted({edit.implementation_module for patch in patches for edit in patch.edits} - {""}),
        "tests": list(dict.fromkeys(tests)) if IS_CLONE else [],
        "page": pages or ["docs/known-defects.md"],
    }


def read_guards(folder: Path) -> dict[str, list[str]]:
    """Return {id of a patch: the test files, or single tests, that are marked with it}. No test is imported."""
    guards: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        for statement in ast.parse(text).body if ".guards(" in text else ():
            test = f"::{statement.name}" if isinstance(statement, ast.FunctionDef) else ""
            for identifier in _ids_in(statement):
                guards.setdefault(identifier, []).append(f"{file.relative_to(folder.parent)}{test}")
    return guards


def _ids_in(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "guards":
            yield from map(ast.literal_eval, node.args)


def declaration_of(identifier: str) -> Path:
    """The file that declares the patch of this id."""
    (file,) = PACKAGE.glob(f"*/{identifier.replace('-', '_')}.py")
    return file


def _relative(file: Path) -> str:
    return str(file.relative_to(CLONE if IS_CLONE else PACKAGE.parent))
