"""Fingerprints: does this target still have the source that its override was written against?

A fingerprint is a hash of the normalised syntax tree: comments, docstrings and formatting do not count, and it
is the same on every Python that can parse the source. `fingerprints.json` (made by scripts/fingerprint.py) holds,
for each target, which releases have which fingerprint.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .declare import AddField, AddFlag, Edit, Export, Patch, Wrap
from .source import find_definition, parse

ABSENT = "absent"


def fingerprint(edit: Edit, path: list[str] | None = None) -> str:
    """The fingerprint of what `edit` touches, or `ABSENT` where this Megatron has no such thing."""
    node = _find(edit.module, edit.name, path)
    if node is None:
        return ABSENT
    if isinstance(edit, AddField) and isinstance(node, ast.ClassDef):
        # A field added in place depends on how the class is made, not on its other fields.
        node = ast.Tuple(elts=[*node.decorator_list, *node.bases], ctx=ast.Load())
    return hashlib.sha256(repr(_normalise(node)).encode()).hexdigest()[:16]


def has_place(edit: Edit) -> bool:
    """Whether this Megatron has what `edit` changes or, for an Export, the class or module that it adds to."""
    name = edit.name.rpartition(".")[0] if isinstance(edit, Export) else edit.name
    return _find(edit.module, name) is not None


def _find(module: str, name: str, path: list[str] | None = None) -> ast.AST | None:
    tree = parse(module, path)
    return tree if tree is None or not name else find_definition(tree, name)


def _normalise(value: object) -> object:
    """Nested tuples of what the source means. Empty parts are left out: Pythons differ in which they list."""
    if isinstance(value, list):
        return tuple(_normalise(item) for item in value if not _is_docstring(item))
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


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_checked(edit: Edit) -> bool:
    """Whether the source of the edit's target matters, or only that it exists."""
    return not isinstance(edit, (AddFlag, Export)) and not (isinstance(edit, Wrap) and edit.any_source)


@dataclass(frozen=True)
class Table:
    """The known sources: {target: {fingerprint: [release, ...]}}, the releases in order of age."""

    releases: tuple[str, ...]
    targets: dict[str, dict[str, list[str]]]

    @classmethod
    def read(cls, file: Path) -> Table:
        data = json.loads(file.read_text(encoding="utf-8"))
        return cls(tuple(data["releases"]), data["targets"])

    def releases_with(self, target: str, print_: str) -> list[str]:
        """The releases in which `target` has this fingerprint; empty where nobody has looked at that source."""
        return self.targets.get(target, {}).get(print_, [])

    def nearest_release(self, patches: tuple[Patch, ...], path: list[str] | None = None) -> str:
        """The release that agrees with this Megatron on the most targets ("0.19.2 or main" where two do)."""
        votes: Counter[str] = Counter()
        for edit in {edit for patch in patches for edit in patch.edits if is_checked(edit)}:
            votes.update(self.releases_with(edit.target, fingerprint(edit, path)))
        most = max(votes.values(), default=0)
        return " or ".join(release for release in self.releases if votes[release] == most)


def make_table(patches: tuple[Patch, ...], sources: dict[str, list[str]]) -> dict[str, object]:
    """What fingerprints.json holds, read from `sources` = {release: search path}."""
    edits = {edit.target: edit for patch in patches for edit in patch.edits if is_checked(edit)}
    targets: dict[str, dict[str, list[str]]] = {}
    for target in sorted(edits):
        row = targets.setdefault(target, {})
        for release, path in sources.items():
            row.setdefault(fingerprint(edits[target], path), []).append(release)
    return {"releases": list(sources), "targets": targets}
