"""`reproduce ID --standalone FILE`: a program and what it uses of this package in one file, to be posted upstream."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from importlib.util import resolve_name
from types import ModuleType
from typing import NamedTuple

from . import needs

PACKAGE = __package__.partition(".")[0]


class Imported(NamedTuple):
    """A name that a module has from another one, or that other one itself if `name` is ''."""

    module: str
    name: str


class Defined(NamedTuple):
    """A function, a class or constants of a module of ours: its lines, and the names in it."""

    text: str
    names: frozenset[str]


def make_standalone(program: ModuleType, head: str) -> str:
    """The text of a file that runs a program and imports nothing of this package; its docstring is `head`."""
    parts = Parts()
    parts.add(program.__name__, "reproduce")
    parts.add(f"{__package__}.standalone_main", "main")
    ranks, otherwise = getattr(program, "RANKS", 1), getattr(program, "EXPECTED", "no error")
    call = f"main(reproduce, ranks={ranks}, needs_gpus={needs_gpus(program)}, otherwise={otherwise!r}"
    call += ", needs_apex=True)" if needs.APEX in needs.needs_of(program) else ")"
    top = f'"""{head}\n"""\n\nfrom __future__ import annotations\n\n{parts.import_lines()}'
    return "\n\n\n".join([top, *parts.definitions, f'if __name__ == "__main__":\n    {call}\n'])


def needs_gpus(program: ModuleType) -> bool:
    """True if Megatron calls torch.cuda in it: `reproduce` has that on a CPU, a file that is posted has not."""
    return not getattr(program, "WITHOUT_CUDA", False)


class Parts:
    """The statements of the file, each definition after those that it uses."""

    def __init__(self) -> None:
        self.definitions: list[str] = []
        self._imported: set[Imported] = set()
        self._seen: set[Defined] = set()

    def add(self, module: str, name: str) -> None:
        """Add what a module of ours calls `name`, and what that uses; nothing for a builtin or a local variable."""
        origin = read_names(module).get(name)
        if isinstance(origin, Defined) and origin not in self._seen:
            self._seen.add(origin)
            for used in sorted(origin.names):
                self.add(module, used)
            self.definitions.append(origin.text)
        elif isinstance(origin, Imported) and origin.module.startswith(f"{PACKAGE}."):
            self.add(origin.module, origin.name)
        elif isinstance(origin, Imported):
            self._imported.add(origin)

    def import_lines(self) -> str:
        """The imports of what is not ours, one a line."""
        modules = sorted(f"import {module}" for module, name in self._imported if not name)
        names = sorted(f"from {module} import {name}" for module, name in self._imported if name)
        return "\n".join([*modules, *names])


@functools.cache
def read_names(module: str) -> dict[str, Imported | Defined]:
    """Map the names at the top of a module of ours to their imports or definitions."""
    source = inspect.getsource(importlib.import_module(module))
    names: dict[str, Imported | Defined] = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom):
            origin = resolve_name("." * statement.level + (statement.module or ""), module.rpartition(".")[0])
            names |= {alias.name: Imported(origin, alias.name) for alias in statement.names}
        elif isinstance(statement, ast.Import):
            names |= {alias.name: Imported(alias.name, "") for alias in statement.names}
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names[statement.name] = define(statement, source)
        elif isinstance(statement, ast.Assign):
            stored = [
                node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)
            ]
            names |= dict.fromkeys(stored, define(statement, source))
    return names


def define(statement: ast.stmt, source: str) -> Defined:
    decorators = getattr(statement, "decorator_list", [])
    first = min(node.lineno for node in (statement, *decorators))
    lines = source.splitlines()[first - 1 : statement.end_lineno]
    return Defined("\n".join(lines), frozenset(node.id for node in ast.walk(statement) if isinstance(node, ast.Name)))
