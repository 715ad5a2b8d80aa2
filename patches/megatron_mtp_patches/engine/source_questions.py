"""What the engine asks of a source file, and how a syntax tree answers.

The answers are small and depend on the bytes of the file alone, so they can be kept where the tree cannot.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .declare import AddField, Edit, Patch, Probe
from .source import contains_expression, find_definition, is_docstring

ABSENT = "absent"
Answer = str | bool | list[int]


class Question(NamedTuple):
    """One question about a file.

    Attributes:
        kind: 'fingerprint' of a definition; 'class_fingerprint', of how a class is made whatever its body;
            'exists', whether there is a definition; 'contains', whether there is one that holds an expression;
            'lines', in which functions of this name begin.
        name: the qualified name of the definition; for 'lines' the bare name of the function.
        expression: what 'contains' looks for.
    """

    kind: str
    name: str
    expression: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, self))


def ask_fingerprint(edit: Edit) -> Question:
    """A field added in place depends on how the class is made, not on its other fields."""
    return Question("class_fingerprint" if isinstance(edit, AddField) else "fingerprint", edit.name)


def ask_existence(edit: Edit) -> Question:
    """Of what `edit` changes or, where it may add the name, of the class for it; no name stands for the module."""
    return Question("exists", edit.name.rpartition(".")[0] if edit.adds_name else edit.name)


def ask_probe(probe: Probe) -> Question:
    name = probe.target.partition(":")[2]
    return Question("exists", name) if probe.contains is None else Question("contains", name, probe.contains)


def ask_lines(function: str) -> Question:
    return Question("lines", function)


def questions_about(patches: Iterable[Patch]) -> dict[str, set[Question]]:
    """{module: all that the engine asks of its source to apply these patches}"""
    asked: dict[str, set[Question]] = {}
    for patch in patches:
        for edit in patch.edits:
            module_questions = asked.setdefault(edit.module, set())
            if edit.check_source:
                module_questions.add(ask_fingerprint(edit))
            if edit.adds_name or not edit.check_source:
                module_questions.add(ask_existence(edit))
            if edit.check_source and not isinstance(edit, AddField):
                module_questions.add(ask_lines(edit.name.rpartition(".")[2]))
        if patch.probe is not None:
            asked.setdefault(patch.probe.target.partition(":")[0], set()).add(ask_probe(patch.probe))
    return asked


def answer(tree: ast.Module, questions: Iterable[Question]) -> dict[str, Answer]:
    """{question, as text: its answer}"""
    lines = _first_lines(tree)
    return {str(question): _answer(tree, lines, question) for question in questions}


def _answer(tree: ast.Module, lines: dict[str, list[int]], question: Question) -> Answer:
    if question.kind == "lines":
        return lines.get(question.name, [])
    node = find_definition(tree, question.name) if question.name else tree
    if question.kind == "exists":
        return node is not None
    if question.kind == "contains":
        return node is not None and contains_expression(node, question.expression)
    if node is None:
        return ABSENT
    if question.kind == "class_fingerprint" and isinstance(node, ast.ClassDef):
        node = ast.Tuple(elts=[*node.decorator_list, *node.bases], ctx=ast.Load())
    return hashlib.sha256(repr(_normalise(node)).encode()).hexdigest()[:16]


def _first_lines(tree: ast.Module) -> dict[str, list[int]]:
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


def _normalise(value: object) -> object:
    """Nested tuples of what the source means. Empty parts are left out: Pythons differ in which they list."""
    if isinstance(value, list):
        return tuple(_normalise(item) for item in value if not is_docstring(item))
    if not isinstance(value, ast.AST):
        return value
    parts = []
    for name in value._fields:
        part = getattr(value, name, None)
        if isinstance(value, ast.JoinedStr):  # Python 3.12 ends nested format specs with an empty text
            part = [item for item in value.values if not (isinstance(item, ast.Constant) and item.value == "")]
        if part is None and not isinstance(value, ast.Constant) or part == []:
            continue
        if name in ("ctx", "type_comment", "kind"):
            continue
        parts.append((name, _normalise(part)))
    return (type(value).__name__, *parts)
