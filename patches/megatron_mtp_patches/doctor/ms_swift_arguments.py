"""The names of ms-swift's arguments, by its sources: its import takes as long as a rehearsal."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator

from ..engine.source import find_file
from .places import MS_SWIFT


def find_unknown(names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for those names that no command of the installed ms-swift takes, if it is installed.

    Its parser takes the beginning of a name for the whole. Arguments that the patches add are not among them: whether
    they act is a question of its own.
    """
    declared = _declared_names()
    added = MS_SWIFT.sections[""]
    if declared and (unknown := [name for name in names if name not in added and not _is_known(name, declared)]):
        yield f"the ms-swift that is installed refuses {', '.join(unknown)}: it has no such argument"


def _is_known(name: str, declared: Iterable[str]) -> bool:
    return any(one.startswith(name) for one in declared)


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
