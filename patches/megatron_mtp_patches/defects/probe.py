"""Whether the source of a Megatron has a defect. Nothing is imported."""

from __future__ import annotations

import ast
import contextlib
import functools
from pathlib import Path

from ..engine.source import find_definition, find_file, parse_bytes
from .declare import Defect, Sign


def has_defect(defect: Defect, path: list[str] | None = None) -> bool | None:
    """Whether a Megatron has `defect`; None where its tree lacks the modules that would show it.

    `path` reads these directories instead of the running interpreter's.
    """
    answers = [is_there(sign, path) for sign in defect.signs]
    if all(answer is None for answer in answers):
        return None
    return any(answers) and not any(is_there(sign, path) for sign in defect.fixed_by)


def is_there(sign: Sign, path: list[str] | None = None) -> bool | None:
    """Whether a source has `sign`; None where there is no such module.

    Raises:
        megatron_mtp_patches.engine.PatchError: the module does not parse.
    """
    module, _, name = sign.target.partition(":")
    file = find_file(module, path)
    if file is None:
        return None
    code = _code_of(file, file.stat().st_mtime_ns, name)
    if code is None:
        return False
    return all(_contains(code, piece) for piece in _pieces(sign.has)) and not any(
        _contains(code, piece) for piece in _pieces(sign.lacks)
    )


def _pieces(code: str | tuple[str, ...]) -> tuple[str, ...]:
    return (code,) if isinstance(code, str) else code


def _contains(code: str, piece: str) -> bool:
    return any(spelling in code for spelling in _spellings(piece))


@functools.cache
def _code_of(file: Path, changed: int, name: str) -> str | None:
    """The normalised code of a definition, or of the whole file; None where it has no such definition."""
    tree = _parse(file, changed)
    node = find_definition(tree, name) if name else tree
    return None if node is None else _normalise(node)


@functools.lru_cache(maxsize=8)  # the defects of a module follow each other
def _parse(file: Path, changed: int) -> ast.Module:
    return parse_bytes(file.read_bytes(), file)


def _normalise(node: ast.AST) -> str:
    for child in ast.walk(node):
        body = getattr(child, "body", None)
        if isinstance(body, list) and len(body) > 1 and _is_docstring(body[0]):
            del body[0]
    return " ".join(ast.unparse(node).split())


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@functools.cache
def _spellings(piece: str) -> set[str]:
    """As it is written, because it need not be whole code (`if config.fp8:`, `group=self.group`), and normalised."""
    spellings = {" ".join(piece.split())}
    for mode in ("eval", "exec"):  # a string alone would be taken for a docstring
        with contextlib.suppress(SyntaxError):
            return spellings | {_normalise(ast.parse(piece, mode=mode))}
    return spellings
