"""`drift`: which targets have a source that the patches were not written against; `--accept` makes it a known one."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from ..applied import ENGINE
from ..catalog import BASE, CATALOG
from ..defects.catalog import RELEASES, write_releases
from ..engine import Override, Patch, PatchError, UsageError
from ..engine.decision import decide
from ..engine.fingerprints import ABSENT, KnownSources, fingerprint, release_package
from ..engine.new_release import add_release, write_known_sources
from ..engine.source import find_file
from ..megatrons.installed import describe_megatron, known_sources
from .console import make_console


def show_drift(
    against: str | None, since: str | None = None, accept: str | None = None, only: Collection[str] = ()
) -> int:
    """Print each patch with its state, each checked target and the releases that share its source; 1 if one is unknown.

    The unknown ones come once more at the end. With `accept`, what became known is printed instead, what it replaced,
    what the folder lacks, and which functions of it will not run because the patches replace them.

    `against`: None reads what is installed; a directory, the checkout or site-packages there; a known release asks
    which targets of the installed Megatron differ from that release. `since` asks it of a directory. `accept` adds the
    sources of a directory to the known ones, as those of a release of this name: of Megatron ("0.20.0") or of another
    package that is patched ("verl 0.9.2"); then the answer is 0. `only` restricts it to these targets of a Megatron,
    under any name; what is known of other targets under this name stays.
    """
    sources = known_sources()
    folders = _find_folders(against, sources)
    release = since if folders or since else against
    if since not in (None, *sources.releases):
        raise UsageError(f"--since {since!r}: the releases are {', '.join(sources.releases)}")
    if since and against and not folders:
        raise UsageError("--since goes with a folder: --against FOLDER --since RELEASE")
    if accept and not folders:
        raise UsageError("--accept goes with a folder: --against FOLDER --accept RELEASE")
    if not folders and find_file("megatron.core") is None:
        raise PatchError(describe_megatron())
    patches = find_patches(folders or None)
    if release or accept:
        package = "" if only else release_package(release or accept or "")
        patches = [patch for patch in patches if patch.package == package]
    targets = {edit.target for patch in patches for edit in patch.edits if edit.check_source}
    if only and (not accept or not targets.issuperset(only)):
        raise UsageError("--only TARGET goes with --accept NAME, and names a target that `drift` shows")
    if accept and not patches:
        names = sorted({patch.package for patch in CATALOG} - {""})
        raise UsageError(
            f"--accept {accept!r}: {against} has nothing of it that the patches change. A release is called as in "
            f"0.20.0 if it is Megatron's, otherwise by one of the packages {', '.join(names)} and its version"
        )
    console = make_console()
    if accept:
        accepted = _accept(sources, accept, folders, only)
        console.print(f"{accept} is known now, in {ENGINE.table_file}", soft_wrap=True)
        new = _print_changes(console, sources, accepted, accept)
        there = {target for target, digest in accepted.release_fingerprints(accept).items() if digest != ABSENT}
        _print_replaced(console, patches, there.intersection(new))
        changed = {edit.target for patch in patches for edit in patch.edits}
        _print_missing_modules(console, accept, folders, only or changed)
        return 0
    rows, differing = _compare(sources, patches, folders or None, release)
    what = f"targets that differ from {release}" if release else "unknown targets"
    console.print(against if folders else describe_megatron(), soft_wrap=True)
    if release:
        console.print(
            f"Functions that the patches change and whose source here is not that of {release}, with the "
            "releases that have the source that is here:",
            soft_wrap=True,
        )
    console.print(rows)
    _print_names(console, what, differing)
    return int(bool(differing))


def find_patches(path: list[str] | None) -> list[Patch]:
    """The patches of what is there: of Megatron, and of the other packages that they change."""
    megatron = find_file("megatron.core", path) is not None
    there = {patch.package for patch in CATALOG if any(find_file(module, path) for module in patch.modules)}
    return [patch for patch in CATALOG if (patch.package in there if patch.package else megatron)]


def _find_folders(against: str | None, sources: KnownSources) -> list[str]:
    """The folders that `against` names; none where it is None or a release."""
    if against in (None, *sources.releases):
        return []
    assert against
    folders = against.split(os.pathsep)
    for folder in folders:
        if not find_patches([folder]):
            raise UsageError(
                f"{folder!r} is neither a folder with megatron/core or another package in it that is patched, nor one "
                f"of {', '.join(sources.releases)}"
            )
    return folders


def _compare(
    sources: KnownSources, patches: list[Patch], path: list[str] | None, release: str | None
) -> tuple[Table, list[str]]:
    """A table of the targets that differ from `release`, and their names.

    Without a release the table has every patch with its state and every target, and unknown sources are counted.
    """
    differing = set()
    table = Table(Column("target", overflow="fold"), "source as in")
    for patch in patches:
        shown = []
        for edit in {edit.target: edit for edit in patch.edits if edit.check_source}.values():
            digest = fingerprint(edit, path)
            releases = sources.releases_with(edit.target, digest)
            same = release in releases if release else bool(releases)
            if not same:
                differing.add(edit.target)
            names = ", ".join(releases) or "no known release"
            text = f"absent; so in {names}" if digest == ABSENT else names
            if not (same and release):  # what is as in that release was not asked for
                shown.append((edit.target, text if same else f"[red]{text}[/]"))
        if shown or not release:
            table.add_section()
            state = "" if release else f"[bold]{decide(patch, sources, ENGINE.project, path).state}[/]"
            table.add_row(f"[bold]{patch.id}[/]", state)
            for cells in shown:
                table.add_row(*cells)
    return table, sorted(differing)


def _accept(sources: KnownSources, release: str, folders: list[str], only: Collection[str]) -> KnownSources:
    """Write `known` with the sources of `release`, and return it."""
    file = Path(ENGINE.table_file)
    accepted = add_release(sources, (*BASE, *CATALOG), release, folders, only)
    try:
        write_known_sources(accepted, file)
        if not only and not release_package(release):
            write_releases(release, folders, file.with_name(RELEASES.name))
    except OSError as error:
        raise PatchError(f"cannot write {file}: {error.strerror}") from error
    return accepted


def _print_changes(console: Console, sources: KnownSources, accepted: KnownSources, release: str) -> list[str]:
    """Print which sources are new, and which known ones of `release` were replaced; return the new ones' targets."""
    new = [target for target, row in accepted.targets.items() if row.keys() - sources.targets.get(target, {}).keys()]
    before, after = sources.release_fingerprints(release), accepted.release_fingerprints(release)
    replaced = [target for target, digest in before.items() if after.get(target, digest) != digest]
    _print_names(console, "sources that no release had", new)
    _print_names(console, f"known sources of {release} that were replaced", replaced)
    if replaced:
        file = Path(ENGINE.table_file)
        console.print(
            f"If the folder is of another release, undo this by restoring {file.name}: `git checkout {file}` in a "
            "clone, or install the package again",
            soft_wrap=True,
        )
    return new


def _print_replaced(console: Console, patches: list[Patch], new: Collection[str]) -> None:
    """Print which functions with a `new` source the patches replace: the version of the folder will not run."""
    edits = (edit for patch in patches for edit in patch.edits if isinstance(edit, Override) and edit.replaces)
    if replaced := {edit.target for edit in edits if edit.target in new}:
        what = "functions that the patches replace: what is different in the folder's version will not run"
        _print_names(console, what, replaced)
        console.print("To run that version, leave out their patches (`explain` names them)", soft_wrap=True)


def _print_missing_modules(console: Console, release: str, folders: list[str], targets: Iterable[str]) -> None:
    """Print the modules of `targets` that none of the folders has."""
    modules = {target.partition(":")[0] for target in targets}
    missing = {module for module in modules if not any(find_file(module, [folder]) for folder in folders)}
    _print_names(console, f"patched modules that {os.pathsep.join(folders)} lacks", missing)
    if missing:
        console.print(
            f"If {release} has these modules, the folder is not all of it: name one that has them before it, as in "
            "--against CHECKOUT:FOLDER",
            soft_wrap=True,
        )


def _print_names(console: Console, what: str, names: Collection[str]) -> None:
    console.print(f"{what}: {len(names)}", soft_wrap=True)
    for name in sorted(names):
        console.print(f"    {name}", soft_wrap=True)
