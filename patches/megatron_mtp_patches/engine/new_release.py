"""Accepts the sources of a release: afterwards they are known."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path

from .declare import Patch
from .fingerprints import KnownSources, fingerprint, release_package
from .source import find_file

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
    Targets that `patches` do not check are left out.
    """
    patches = tuple(patches)
    checked = {edit.target: edit for patch in patches for edit in patch.edits if edit.check_source}
    package = "" if only else release_package(release)
    package_patches = [patch for patch in patches if patch.package == package]
    targets = {edit.target for patch in package_patches for edit in patch.edits if edit.check_source}
    targets = targets.intersection(only) if only else targets
    rows = {target: deepcopy(sources_before.targets.get(target, {})) for target in sorted(checked)}
    for target in targets if only else checked:
        rows[target] = _without_release(release, rows[target])
    for folder in folders:
        for target in sorted(targets):
            if folder == folders[0] or find_file(checked[target].module, [folder]):
                names = rows[target].setdefault(fingerprint(checked[target], [folder]), [])
                if release not in names:
                    names.append(release)
    releases = {*sources_before.releases} if only or package else {*sources_before.releases, release}
    return KnownSources(tuple(sorted(releases, key=_order)), _in_order(rows))


def write_known_sources(sources: KnownSources, file: Path) -> None:
    """Write `sources` as JSON."""
    table = {"releases": sources.releases, "targets": sources.targets}
    file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _without_release(release: str, row: dict[str, list[str]]) -> dict[str, list[str]]:
    others = {digest: [other for other in releases if other != release] for digest, releases in row.items()}
    return {digest: releases for digest, releases in others.items() if releases}


def _in_order(rows: Rows) -> Rows:
    """The oldest release first, in each row and among the fingerprints of a target."""
    for row in rows.values():
        for releases in row.values():
            releases.sort(key=_order)
    return {target: dict(sorted(row.items(), key=lambda item: _order(item[1][0]))) for target, row in rows.items()}


def _order(release: str) -> tuple[bool, list[int]]:
    """Numbers count as numbers; what has no number, as main, is newest."""
    return not release[:1].isdigit(), [int(number) for number in re.findall(r"\d+", release)]
