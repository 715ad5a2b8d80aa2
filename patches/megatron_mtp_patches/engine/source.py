"""Read a module's source, and find a name in it, without importing anything.

A namespace package may be shadowed in part by a checkout on the path: the module's file is found the way the import
system would find it, and everything else is read from that file.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from .declare import PatchError

_Stamp = tuple[int, int]  # the time of a file's last change and its size: with another stamp it is another file
_HOOKS = ("wrapt", __name__.partition(".")[0])


def find_file(module: str, path: list[str] | None = None) -> Path | None:
    """The source file of `module`, or None where it is not installed or has no source.

    `path` searches these directories instead of the running interpreter's (a checkout, another environment).
    """
    if path is None:
        loaded = getattr(sys.modules.get(module), "__file__", None)
        if loaded:
            return Path(loaded) if loaded.endswith(".py") else None
    spec = None
    locations = path
    for depth in range(1, module.count(".") + 2):
        spec = _find_spec(".".join(module.split(".")[:depth]), locations)
        if spec is None:
            return None
        locations = list(spec.submodule_search_locations or ())
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _find_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        # wrapt's finder would import the parent packages to answer, and ours would ask wrapt's; this question must
        # import nothing.
        if type(finder).__module__.partition(".")[0] in _HOOKS or not hasattr(finder, "find_spec"):
            continue
        try:
            spec = finder.find_spec(name, path)
        except KeyError:  # a namespace package inside a package that is not imported: Python asks sys.modules for that
            spec = finder.find_spec(name.rpartition(".")[2], path)
        if spec is not None:
            return spec
    return None


def ask(question: Callable[..., Any], module: str, *words: str, path: list[str] | None = None) -> Any:
    """Return `question(tree, *words)` of the source of `module`; None if it has no source; `path` as above.

    The answer is kept until the file changes.

    Raises:
        PatchError: the source does not parse.
    """
    file = find_file(module, path)
    return None if file is None else _answer(question, file, _stamp(file), *words)


@functools.cache
def _answer(question: Callable[..., Any], file: Path, stamp: _Stamp, *words: str) -> Any:
    return question(_parse(file, stamp), *words)


def _stamp(file: Path) -> _Stamp:
    status = file.stat()
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=4)  # the trees of all patched files would take 70 MB
def _parse(file: Path, stamp: _Stamp) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        raise PatchError(f"{file} does not parse: {error}") from error


def find_definition(tree: ast.Module, name: str) -> ast.AST | None:
    """The node that binds the qualified `name`: a function, class, assignment or import, the last one winning.

    A class keeps its name where another branch assigns something to it: None, where a library is not installed. ''
    names the tree.
    """
    node: ast.AST | None = tree
    for part in filter(None, name.split(".")):
        node = _find_in_body(getattr(node, "body", []), part)
        if node is None:
            return None
    return node


def _find_in_body(body: list[ast.stmt], name: str) -> ast.AST | None:
    definition: ast.AST | None = None
    for statement in body:
        if name in _names_bound_by(statement):
            definition = statement
        elif isinstance(statement, (ast.If, ast.Try)):
            branches = [statement.body, statement.orelse, getattr(statement, "finalbody", [])]
            branches += [handler.body for handler in getattr(statement, "handlers", [])]
            for branch in branches:
                other = _find_in_body(branch, name)
                is_substitute = isinstance(definition, ast.ClassDef) and isinstance(other, ast.Assign)
                definition = definition if other is None or is_substitute else other
    return definition


def _names_bound_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def has_definition(tree: ast.Module, name: str, expression: str = "") -> bool:
    """True if there is a definition of the qualified `name`, and `expression`, where one is given, occurs in it."""
    node = find_definition(tree, name)
    return node is not None and (not expression or contains_expression(node, expression))


def contains_expression(node: ast.AST, expression: str) -> bool:
    """True if `expression` occurs under `node`, whatever its formatting."""
    wanted = ast.parse(expression, mode="eval").body
    text = ast.dump(wanted)
    return any(ast.dump(child) == text for child in ast.walk(node) if type(child) is type(wanted))


def first_lines(tree: ast.Module) -> dict[str, list[int]]:
    """{bare name of a function: the lines in which functions of this name begin, with their decorators}"""
    lines: dict[str, list[int]] = {}
    for node in _functions(tree):
        first = node.decorator_list[0] if node.decorator_list else node
        lines.setdefault(node.name, []).append(first.lineno)
    return lines


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions under `node`. Only statements hold functions, so the expressions are passed over."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, block, ()):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child
            yield from _functions(child)
