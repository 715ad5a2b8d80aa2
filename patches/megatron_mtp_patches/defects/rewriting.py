"""The small repairs as text: a source with one, and the unified diff that makes it.

`ast` says where a statement or an expression stands; all other text, with its comments, stays as it is.
"""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..engine import PatchError
from ..engine.declare import Edit
from ..engine.fingerprints import ABSENT, KnownSources, fingerprint
from ..engine.source import contains_expression, find_definition, find_file, is_docstring
from .declare import Diff


def is_known(diff: Diff, sources: KnownSources, path: list[str] | None = None) -> bool:
    """True if its function has the source of a known release; comments and formatting do not count.

    `path` reads these directories instead of the running interpreter's.
    """
    digest = fingerprint(Edit(diff.target), path)
    return digest != ABSENT and bool(sources.releases_with(diff.target, digest))


def make_unified_diffs(diffs: Iterable[Diff], path: list[str] | None = None) -> Iterator[str]:
    """Yield what `patch -p1` takes, in the folder that has `megatron`, for each repair: each on top of the ones before.

    `path` as above.

    Raises:
        PatchError: a function has no place for its repair; where its source is known, it has one. Or a file is not in
            UTF-8.
    """
    sources: dict[Path, bytes] = {}
    for diff in diffs:
        file = find_file(diff.module, path)
        if file is None:
            raise PatchError(f"there is no {diff.module}")
        before = sources.get(file) or _read(file)
        sources[file] = rewrite(before, diff)
        depth = diff.module.count(".") + (2 if file.stem == "__init__" else 1)
        name = Path(*file.parts[-depth:]).as_posix()
        # Not splitlines, for which a form feed ends a line as well.
        old, new = (io.StringIO(text.decode()).readlines() for text in (before, sources[file]))
        yield "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))


def _read(file: Path) -> bytes:
    source = file.read_bytes()
    try:
        source.decode()
    except UnicodeDecodeError as error:
        raise PatchError(f"{file} is not in UTF-8 ({error}): convert it first") from error
    return source


def rewrite(source: bytes, diff: Diff) -> bytes:
    """Return the source of a module with a repair.

    Raises:
        PatchError: the function has no place for it.
    """
    function = find_definition(ast.parse(source), diff.target.partition(":")[2])
    statement = next((one for one in _statements(function) if _has_anchor(one, diff)), None)
    if statement is None:
        raise PatchError(f"{diff.target} has no place for its repair: {diff.place} {diff.anchor}".rstrip())
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    if diff.place == "instead of":
        wanted = ast.dump(ast.parse(diff.anchor, mode="eval").body)
        node = next(one for one in ast.walk(statement) if isinstance(one, ast.expr) and ast.dump(one) == wanted)
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return source[:start] + diff.code.encode() + source[end:]
    if diff.place == "after":
        line = statement.end_lineno or 0
    else:
        statement = next(_statements(statement)) if diff.place == "inside" else statement
        line = statement.lineno - 1
        while lines[line - 1].lstrip().startswith(b"#"):  # these comments belong to the statement
            line -= 1
    code = textwrap.indent(textwrap.dedent(diff.code).strip(), " " * statement.col_offset)
    text = f"{code}\n\n" if diff.place == "start" else f"{code}\n"
    if lines[0].endswith(b"\r\n"):
        text = text.replace("\n", "\r\n")
    return source[: starts[line]] + text.encode() + source[starts[line] :]


def _statements(node: ast.AST | None) -> Iterator[ast.stmt]:
    """The statements under `node` but for docstrings, in the order of the text."""
    for child in () if node is None else ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and not is_docstring(child):
            yield child
        yield from _statements(child)


def _has_anchor(statement: ast.stmt, diff: Diff) -> bool:
    """True if the anchor is in the statement itself, not in one of its block; none is in any statement."""
    parts = (part for part in ast.iter_child_nodes(statement) if isinstance(part, (ast.expr, ast.withitem)))
    return not diff.anchor or any(contains_expression(part, diff.anchor) for part in parts)
