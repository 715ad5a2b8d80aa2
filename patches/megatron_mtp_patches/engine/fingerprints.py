"""Fingerprints: does this target still have the source that its override was written against?

A fingerprint is a hash of the normalised syntax tree: comments, docstrings and formatting do not count, and it is the
same on every Python that can parse the source. `fingerprints.json` (written by `drift --accept`) holds for each target
which releases have which fingerprint.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .declare import AddField, Edit, Patch
from .source import ask, find_definition, has_definition, is_docstring

ABSENT = "absent"


def fingerprint(edit: Edit, path: list[str] | None = None) -> str:
    """The fingerprint of what `edit` touches, or `ABSENT` where this release has no such thing."""
    # A field added in place depends on how the class is made, not on its other fields.
    question = _hash_class_statement if isinstance(edit, AddField) else _hash_definition
    return ask(question, edit.module, edit.name, path=path) or ABSENT


def target_exists(edit: Edit, path: list[str] | None = None) -> bool:
    """True if this release has what `edit` changes or, where it may add the name, the class or module for it."""
    if edit.check_source and not edit.adds_name:
        return fingerprint(edit, path) != ABSENT
    return bool(ask(has_definition, edit.module, edit.needed_name, path=path))


def _hash_definition(tree: ast.Module, name: str) -> str:
    return _hash(find_definition(tree, name))


def _hash_class_statement(tree: ast.Module, name: str) -> str:
    """The hash of how a class is made, whatever its body."""
    node = find_definition(tree, name)
    if isinstance(node, ast.ClassDef):
        node = ast.Tuple(elts=[*node.decorator_list, *node.bases], ctx=ast.Load())
    return _hash(node)


def _hash(node: ast.AST | None) -> str:
    return ABSENT if node is None else hashlib.sha256(repr(_normalise(node)).encode()).hexdigest()[:16]


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


@dataclass(frozen=True)
class KnownSources:
    """The sources that the patches were written against.

    Attributes:
        releases: of the library, in order of age.
        targets: {target: {fingerprint: [release, ...]}}; those of another package are called "PACKAGE VERSION".
    """

    releases: tuple[str, ...]
    targets: dict[str, dict[str, list[str]]]

    @classmethod
    def read(cls, file: Path) -> KnownSources:
        data = json.loads(file.read_text(encoding="utf-8"))
        return cls(tuple(data["releases"]), data["targets"])

    def releases_with(self, target: str, digest: str) -> list[str]:
        """The releases in which `target` has this fingerprint; empty where its source was never reviewed."""
        return self.targets.get(target, {}).get(digest, [])

    def release_fingerprints(self, release: str) -> dict[str, str]:
        """{target: its fingerprint in this release}."""
        rows = ((target, digest, names) for target, row in self.targets.items() for digest, names in row.items())
        return {target: digest for target, digest, names in rows if release in names}

    def package_releases(self, package: str) -> tuple[str, ...]:
        """The known releases of a package; '' stands for the library."""
        if not package:
            return self.releases
        names = (name for row in self.targets.values() for releases in row.values() for name in releases)
        return tuple(dict.fromkeys(name for name in names if release_package(name) == package))

    def nearest_release(self, patches: tuple[Patch, ...], path: list[str] | None = None) -> str:
        """The release that agrees on the most targets ("0.19.2 or main" where two do): of the library or, if all
        patches are of one other package, of that."""
        packages = {patch.package for patch in patches}
        candidates = self.package_releases(packages.pop() if len(packages) == 1 else "")
        votes: Counter[str] = Counter()
        for edit in {edit for patch in patches for edit in patch.edits if edit.check_source}:
            votes.update(self.releases_with(edit.target, fingerprint(edit, path)))
        most = max(votes.values(), default=0)
        return " or ".join(release for release in candidates if votes[release] == most)


def release_package(release: str) -> str:
    """ "verl" of "verl 0.9.1", '' of the library's "0.19.2"."""
    return release.rpartition(" ")[0]
