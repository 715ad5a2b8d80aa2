"""The names of ms-swift's arguments, by its sources: its import takes as long as a rehearsal."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator

from ..engine.source import find_file
from .places import MS_SWIFT


def complete(name: str) -> str:
    """The argument of which `name` is an unambiguous beginning, as ms-swift's parser takes it; else `name` itself.

    Where ms-swift is not installed, nothing is known to begin so.
    """
    matches = _matches(name)
    return matches[0] if len(matches) == 1 else name


def find_unknown(names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for those names that no command of the installed ms-swift takes, if it is installed.

    Whether arguments that the patches add act is a question of its own.
    """
    if _declared_names() and (refused := [name for name in names if len(_matches(name)) != 1]):
        yield f"the ms-swift that is installed refuses {', '.join(refused)}: no argument begins so, or several do"


def _matches(name: str) -> list[str]:
    """The arguments that a name stands for: the one that is called so, or those that begin so."""
    declared = _declared_names()
    taken = declared | MS_SWIFT.sections[""] if declared else declared
    return [name] if name in taken else [one for one in taken if one.startswith(name)]


@functools.cache
def _declared_names() -> frozenset[str]:
    """The fields of all classes in its modules of arguments; none where it is not installed."""
    package = find_file("swift")
    if package is None:
        return frozenset()
    files = [file for file in package.parent.rglob("*.py") if "arguments" in str(file.relative_to(package.parent))]
    modules = [ast.parse(file.read_bytes()) for file in files]
    classes = [node for module in modules for node in module.body if isinstance(node, ast.ClassDef)]
    fields = [one.target for node in classes for one in node.body if isinstance(one, ast.AnnAssign)]
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))
