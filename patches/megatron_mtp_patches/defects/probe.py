"""Probes of a Megatron's source for a defect. Nothing is imported."""

from __future__ import annotations

import ast
import contextlib
import functools
from pathlib import Path
from typing import NamedTuple

from ..engine.source import ask, find_definition, find_file, is_docstring
from .declare import Defect, Sign, each


def has_defect(defect: Defect, path: list[str] | None = None) -> bool | None:
    """True if a Megatron has `defect`; None where its tree lacks the package that would show it.

    `path` reads these directories instead of the running interpreter's.
    """
    answers = [is_there(sign, path) for sign in each(defect.signs)]
    if any(answers):
        repairs = each(defect.fixed_by) + ((defect.diff.sign,) if defect.diff else ())
        return not any(is_there(sign, path) for sign in repairs)
    return None if None in answers else False


def is_there(sign: Sign, path: list[str] | None = None) -> bool | None:
    """True if a source has `sign`; None where not even the package of its module is there.

    A wheel has no scripts (gpt_builders.py), that of 0.16.1 no megatron.training.

    Raises:
        megatron_mtp_patches.engine.PatchError: the module does not parse.
    """
    definition = _find(sign.target, path)
    if definition is None:
        parts = sign.target.partition(":")[0].split(".")
        package = ".".join(parts[: 2 if parts[0] == "megatron" else 1])
        return None if find_file(package, path) is None else False
    if definition.code is None:
        return False
    has_all = all(_contains(definition.code, piece) for piece in each(sign.has))
    return has_all and not any(_contains(definition.code, piece) for piece in each(sign.lacks))


def locate(defect: Defect, path: list[str] | None = None) -> tuple[Path, int]:
    """The file and the line in which a Megatron shows `defect`, which it has."""
    definition = next(_find(sign.target, path) for sign in each(defect.signs) if is_there(sign, path))
    assert definition is not None
    return definition.file, definition.line


class _Definition(NamedTuple):
    """A name in a source: its file and first line, and its normalised code; None where the file lacks it."""

    file: Path
    line: int
    code: str | None


def _find(target: str, path: list[str] | None) -> _Definition | None:
    module, _, name = target.partition(":")
    file = find_file(module, path)
    return None if file is None else _Definition(file, *ask(_read, module, name, path=path))


def _read(tree: ast.Module, name: str) -> tuple[int, str | None]:
    node = find_definition(tree, name)
    return getattr(node, "lineno", 1), None if node is None else _normalise(node)


def _contains(code: str, piece: str) -> bool:
    return any(spelling in code for spelling in _spellings(piece))


def _normalise(node: ast.AST) -> str:
    for child in ast.walk(node):  # of a tree that others read, for whom docstrings do not count
        body = getattr(child, "body", None)
        if isinstance(body, list) and len(body) > 1 and is_docstring(body[0]):
            del body[0]
    return " ".join(ast.unparse(node).split())


@functools.cache
def _spellings(piece: str) -> set[str]:
    """As it is written, because it need not be whole code (`if config.fp8:`, `group=self.group`), and normalised."""
    spellings = {" ".join(piece.split())}
    for mode in ("eval", "exec"):  # a string alone would be taken for a docstring
        with contextlib.suppress(SyntaxError):
            return spellings | {_normalise(ast.parse(piece, mode=mode))}
    return spellings
