"""Accepts the sources of a release: afterwards its fingerprints are known, and its files need not be parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path

from .declare import Edit, Patch
from .fingerprints import KnownSources, release_package
from .source import find_file, parse_bytes
from .source_cache import hash_bytes
from .source_questions import ABSENT, Answer, Question, answer, ask_fingerprint, questions_about

Files = dict[str, dict[str, dict[str, Answer]]]  # as in KnownSources
Rows = dict[str, dict[str, list[str]]]


def make_known_sources(patches: Iterable[Patch], sources: Mapping[str, list[str]]) -> KnownSources:
    """The known sources of `sources` = {release: folders}, see `add_release`."""
    sources_before, patches = KnownSources((), {}), tuple(patches)
    for release, folders in sources.items():
        sources_before = add_release(sources_before, patches, release, folders)
    return sources_before


def add_release(
    sources_before: KnownSources, patches: Iterable[Patch], release: str, folders: list[str], only: Iterable[str] = ()
) -> KnownSources:
    """`sources_before` with `release` as it is in `folders`, whatever was known of a release of this name before.

    A release of another package than the library, "PACKAGE VERSION", is about the targets of the patches of that
    package. With `only`, `release` names sources that need not be a release. Only these targets become known under this
    name; what is known of others under it stays.
    Each folder holds the release; the first decides what it lacks, as a wheel may have fewer modules than the checkout.
    Targets that `patches` do not check, and files that are no release's any longer, are left out.
    """
    patches = tuple(patches)
    checked = {edit.target: edit for patch in patches for edit in patch.edits if edit.check_source}
    package = "" if only else release_package(release)
    package_patches = [patch for patch in patches if patch.package == package]
    targets = {edit.target for patch in package_patches for edit in patch.edits} & checked.keys()
    targets = targets.intersection(only) if only else targets
    questions = questions_about(patches)
    files = {module: dict(sources_before.files.get(module, {})) for module in sorted(questions)}
    rows = {target: deepcopy(sources_before.targets.get(target, {})) for target in sorted(checked)}
    for target in targets if only else checked:
        rows[target] = _without(release, rows[target])
    modules = {checked[target].module for target in targets} if only else questions_about(package_patches).keys()
    for folder in folders:
        answers_by_module = {module: _read(module, folder, questions[module], files[module]) for module in modules}
        for target in sorted(targets):
            row, answers = rows[target], answers_by_module[checked[target].module]
            if answers is not None or folder == folders[0]:
                digest = ABSENT if answers is None else str(answers[str(ask_fingerprint(checked[target]))])
                if release not in row.setdefault(digest, []):
                    row[digest].append(release)
    releases = {*sources_before.releases} if only or package else {*sources_before.releases, release}
    return KnownSources(tuple(sorted(releases, key=_age)), _in_order(rows), _drop_unknown(files, checked, rows))


def write_known_sources(sources: KnownSources, file: Path) -> None:
    """Write it as JSON, each known file in one line."""
    modules = [
        f"  {json.dumps(module)}: {{\n"
        + ",\n".join(f"   {json.dumps(digest)}: {json.dumps(answers)}" for digest, answers in by_hash.items())
        + "\n  }"
        for module, by_hash in sources.files.items()
    ]
    rest = json.dumps({"releases": sources.releases, "targets": sources.targets}, indent=1).removesuffix("\n}")
    file.write_text(f'{rest},\n "files": {{\n' + ",\n".join(modules) + "\n }\n}\n", encoding="utf-8")


def _read(
    module: str, folder: str, questions: set[Question], answers_by_hash: dict[str, dict[str, Answer]]
) -> dict[str, Answer] | None:
    """The answers of `module` in `folder`, which become known, too; None where it is not there."""
    file = find_file(module, [folder])
    if file is None:
        return None
    source = file.read_bytes()
    answers = answers_by_hash.get(hash_bytes(source), {})
    if answers.keys() != set(map(str, questions)):
        answers = answers_by_hash[hash_bytes(source)] = answer(parse_bytes(source, file), sorted(questions))
    return answers


def _without(release: str, row: dict[str, list[str]]) -> dict[str, list[str]]:
    others = {digest: [other for other in releases if other != release] for digest, releases in row.items()}
    return {digest: releases for digest, releases in others.items() if releases}


def _in_order(rows: Rows) -> Rows:
    """The oldest release first, in each row and among the fingerprints of a target."""
    for row in rows.values():
        for releases in row.values():
            releases.sort(key=_age)
    return {target: dict(sorted(row.items(), key=lambda item: _age(item[1][0]))) for target, row in rows.items()}


def _age(release: str) -> tuple[bool, list[int]]:
    """Numbers count as numbers; what has no number, as main, is newest."""
    return not release[:1].isdigit(), [int(number) for number in re.findall(r"\d+", release)]


def _drop_unknown(files: Files, checked: Mapping[str, Edit], rows: Rows) -> Files:
    """`files` without those that have a target as no release has it."""

    def is_known(module: str, answers: dict[str, Answer]) -> bool:
        edits = (edit for edit in checked.values() if edit.module == module)
        fingerprints = ((edit.target, answers.get(str(ask_fingerprint(edit)))) for edit in edits)
        return all(digest is None or digest in rows[target] for target, digest in fingerprints)

    kept = {
        module: {digest: answers for digest, answers in by_hash.items() if is_known(module, answers)}
        for module, by_hash in files.items()
    }
    return {module: by_hash for module, by_hash in kept.items() if by_hash}
