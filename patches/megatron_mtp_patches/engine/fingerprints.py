"""Fingerprints: does this target still have the source that its override was written against?

A fingerprint is a hash of the normalised syntax tree: comments, docstrings and formatting do not count, and it is the
same on every Python that can parse the source. `fingerprints.json` (written by `drift --accept`) holds for each target
which releases have which fingerprint, and for each file of these releases all that the engine would ask of its syntax
tree: a file with the same bytes is not parsed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .declare import Edit, Patch
from .source_cache import ask, expect_questions, learn_known_files
from .source_questions import ABSENT, Answer, ask_existence, ask_fingerprint

__all__ = ["ABSENT", "KnownSources", "fingerprint", "open_known_sources", "target_exists"]


def fingerprint(edit: Edit, path: list[str] | None = None) -> str:
    """The fingerprint of what `edit` touches, or `ABSENT` where this release has no such thing."""
    digest = ask(edit.module, ask_fingerprint(edit), path)
    return ABSENT if digest is None else str(digest)


def target_exists(edit: Edit, path: list[str] | None = None) -> bool:
    """Whether this release has what `edit` changes or, where it may add the name, the class or module for it."""
    if edit.check_source and not edit.adds_name:
        return fingerprint(edit, path) != ABSENT
    return bool(ask(edit.module, ask_existence(edit), path))


@dataclass(frozen=True)
class KnownSources:
    """The sources that the patches were written against.

    Attributes:
        releases: of the library, in order of age.
        targets: {target: {fingerprint: [release, ...]}}; those of another package are called "PACKAGE VERSION".
        files: {module: {hash of a known file's bytes: {question: answer}}}; such a file need not be parsed.
    """

    releases: tuple[str, ...]
    targets: dict[str, dict[str, list[str]]]
    files: dict[str, dict[str, dict[str, Answer]]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> KnownSources:
        data = json.loads(file.read_text(encoding="utf-8"))
        return cls(tuple(data["releases"]), data["targets"], data.get("files", {}))

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


def open_known_sources(file: Path, patches: Iterable[Patch]) -> KnownSources:
    """What `file` holds. The answers about known files, and what these patches ask of others, are remembered."""
    sources = KnownSources.read(file)
    learn_known_files(sources.files)
    expect_questions(patches)
    return sources
