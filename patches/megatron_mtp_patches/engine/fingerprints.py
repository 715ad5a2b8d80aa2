"""Fingerprints: does this target still have the source that its override was written against?

A fingerprint is a hash of the normalised syntax tree: comments, docstrings and formatting do not count, and it
is the same on every Python that can parse the source. `fingerprints.json` (made by scripts/fingerprint.py) holds,
for each target, which releases have which fingerprint; and for each file of these releases all that the engine would
ask of its syntax tree, so that a file with the same bytes is not parsed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .declare import Edit, Patch
from .facts import ask, expect_questions, hash_bytes, learn_known_files
from .questions import ABSENT, Answer, Question, answer, ask_existence, ask_fingerprint, is_checked, questions_about
from .source import find_file, parse_bytes

__all__ = ["ABSENT", "Table", "fingerprint", "has_place", "is_checked", "make_table", "open_table"]


def fingerprint(edit: Edit, path: list[str] | None = None) -> str:
    """The fingerprint of what `edit` touches, or `ABSENT` where this Megatron has no such thing."""
    found = ask(edit.module, ask_fingerprint(edit), path)
    return ABSENT if found is None else str(found)


def has_place(edit: Edit) -> bool:
    """Whether this Megatron has what `edit` changes or, for an Export, the class or module that it adds to."""
    if is_checked(edit):
        return fingerprint(edit) != ABSENT
    return bool(ask(edit.module, ask_existence(edit)))


@dataclass(frozen=True)
class Table:
    """The known sources.

    Attributes:
        releases: in order of age.
        targets: {target: {fingerprint: [release, ...]}}
        files: {module: {hash of a known file's bytes: {question: answer}}}; such a file need not be parsed.
    """

    releases: tuple[str, ...]
    targets: dict[str, dict[str, list[str]]]
    files: dict[str, dict[str, dict[str, Answer]]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Table:
        data = json.loads(file.read_text(encoding="utf-8"))
        return cls(tuple(data["releases"]), data["targets"], data.get("files", {}))

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


def open_table(file: Path, patches: Iterable[Patch]) -> Table:
    """The table in `file`. What it says of known files, and what these patches ask of others, is known from now on."""
    table = Table.read(file)
    learn_known_files(table.files)
    expect_questions(patches)
    return table


def make_table(patches: Iterable[Patch], sources: dict[str, list[str]]) -> dict[str, object]:
    """What fingerprints.json holds, read from `sources` = {release: folders}.

    Each folder holds the release; the first says what it lacks, as a wheel may have fewer modules than the checkout.
    """
    patches = tuple(patches)
    edits = {edit.target: edit for patch in patches for edit in patch.edits if is_checked(edit)}
    targets: dict[str, dict[str, list[str]]] = {target: {} for target in sorted(edits)}
    files: dict[str, dict[str, dict[str, Answer]]] = {}
    questions = questions_about(patches)
    for release, folders in sources.items():
        for folder in folders:
            found = {module: _read_module(module, folder, questions[module], files) for module in sorted(questions)}
            for target, row in targets.items():
                answers = found[edits[target].module]
                if answers is not None or folder == folders[0]:
                    print_ = ABSENT if answers is None else str(answers[str(ask_fingerprint(edits[target]))])
                    if release not in row.setdefault(print_, []):
                        row[print_].append(release)
    return {"releases": list(sources), "targets": targets, "files": dict(sorted(files.items()))}


def _read_module(
    module: str, folder: str, questions: set[Question], files: dict[str, dict[str, dict[str, Answer]]]
) -> dict[str, Answer] | None:
    """The answers of `module` in `folder`, which are put into `files`, too; None where it is not there."""
    file = find_file(module, [folder])
    if file is None:
        return None
    source = file.read_bytes()
    of_module = files.setdefault(module, {})
    if hash_bytes(source) not in of_module:
        of_module[hash_bytes(source)] = answer(parse_bytes(source, file), sorted(questions))
    return of_module[hash_bytes(source)]
