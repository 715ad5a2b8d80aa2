"""`drift`: which targets have a source that the patches were not written against; `--accept` makes it a known one."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from rich.table import Column, Table

from ..catalog import BASE, CATALOG
from ..defects.catalog import RELEASES, write_releases
from ..engine import Override, Patch, PatchError, UsageError
from ..engine.decision import decide
from ..engine.declare import Edit
from ..engine.fingerprints import ABSENT, KnownSources, fingerprint, release_package
from ..engine.new_release import add_release, write_known_sources
from ..engine.source import find_file
from ..megatron_engine import ENGINE
from ..megatrons.installed import describe_megatron, known_sources
from .console import make_console, make_printer

_WRONG_ONLY = "--only TARGET goes with --accept NAME, and names a target that `drift` shows"
Show = Callable[[str], None]


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
    if accept and not folders:
        raise UsageError("--accept goes with a folder: --against FOLDER --accept RELEASE")
    if since and against and not folders:
        raise UsageError("--since goes with a folder: --against FOLDER --since RELEASE")
    if since not in (None, *sources.releases):
        raise UsageError(f"--since {since!r}: the releases are {', '.join(sources.releases)}")
    if not folders and find_file("megatron.core") is None:
        raise PatchError(describe_megatron())
    if accept:
        return _accept(sources, accept, folders, only)
    if only:
        raise UsageError(_WRONG_ONLY)
    return _compare(sources, folders, since if folders or since else against)


def find_patches(path: list[str] | None) -> list[Patch]:
    """The patches of what is there: of Megatron, and of the other packages that they change."""
    has_megatron = find_file("megatron.core", path) is not None
    there = {patch.package for patch in CATALOG if any(find_file(module, path) for module in patch.modules)}
    return [patch for patch in CATALOG if (patch.package in there if patch.package else has_megatron)]


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


def _compare(sources: KnownSources, folders: list[str], release: str | None) -> int:
    """Print the targets that differ from `release`, and their names; 1 if there are any.

    Without a release the table has every patch with its state and every target, and unknown sources are counted.
    """
    path = folders or None
    differing = set()
    patches = [patch for patch in find_patches(path) if not (release and patch.package)]
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
    show = make_printer()
    show(os.pathsep.join(folders) or describe_megatron())
    if release:
        show(
            f"Functions that the patches change and whose source here is not that of {release}, with the "
            "releases that have the source that is here:"
        )
    make_console().print(table)
    _print_names(show, f"targets that differ from {release}" if release else "unknown targets", differing)
    return int(bool(differing))


def _accept(sources: KnownSources, release: str, folders: list[str], only: Collection[str]) -> int:
    """Make the sources of `release` known, and print what that changes."""
    package = "" if only else release_package(release)
    patches = [patch for patch in find_patches(folders) if patch.package == package]
    edits = [edit for patch in patches for edit in patch.edits]
    if not {edit.target for edit in edits if edit.check_source}.issuperset(only):
        raise UsageError(_WRONG_ONLY)
    if not patches:
        names = sorted({patch.package for patch in CATALOG} - {""})
        raise UsageError(
            f"--accept {release!r}: {os.pathsep.join(folders)} has nothing of it that the patches change. A release is "
            "called as in 0.20.0 if it is Megatron's, otherwise by one of the packages "
            f"{', '.join(names)} and its version"
        )
    file = Path(ENGINE.table_file)
    accepted = add_release(sources, (*BASE, *CATALOG), release, folders, only)
    try:
        write_known_sources(accepted, file)
        if not only and not package:
            write_releases(release, folders, file.with_name(RELEASES.name))
    except OSError as error:
        raise PatchError(f"cannot write {file}: {error.strerror}") from error
    show = make_printer()
    show(f"{release} is known now, in {file}")
    new = _print_changes(show, sources, accepted, release)
    there = {target for target, digest in accepted.release_fingerprints(release).items() if digest != ABSENT}
    _print_replaced(show, edits, there.intersection(new))
    _print_missing_modules(show, sources, release, folders, only or {edit.target for edit in edits})
    return 0


def _print_changes(show: Show, sources: KnownSources, accepted: KnownSources, release: str) -> list[str]:
    """Print which sources are new, and which known ones of `release` were replaced; return the new ones' targets."""
    new = [target for target, row in accepted.targets.items() if row.keys() - sources.targets.get(target, {}).keys()]
    before, after = sources.release_fingerprints(release), accepted.release_fingerprints(release)
    replaced = [target for target, digest in before.items() if after.get(target, digest) != digest]
    _print_names(show, "sources that no release had", new)
    _print_names(show, f"known sources of {release} that were replaced", replaced)
    if replaced:
        file = Path(ENGINE.table_file)
        show(
            f"If the folder is of another release, undo this by restoring {file.name}: `git checkout {file}` in a "
            "clone, or install the package again",
        )
    return new


def _print_replaced(show: Show, edits: list[Edit], new: Collection[str]) -> None:
    """Print which functions with a `new` source the patches replace: the version of the folder will not run."""
    replacing = (edit for edit in edits if isinstance(edit, Override) and edit.replaces)
    if replaced := {edit.target for edit in replacing if edit.target in new}:
        what = "functions that the patches replace: what is different in the folder's version will not run"
        _print_names(show, what, replaced)
        show("To run that version, leave out their patches (`explain` names them)")


def _print_missing_modules(
    show: Show, sources: KnownSources, release: str, folders: list[str], targets: Iterable[str]
) -> None:
    """Print the modules of `targets` that none of the folders has, unless the release was known not to have them."""
    before = sources.release_fingerprints(release).items()
    had = {target.partition(":")[0] for target, digest in before if digest != ABSENT}
    modules = {target.partition(":")[0] for target in targets}
    missing = {module for module in modules if not any(find_file(module, [folder]) for folder in folders)}
    missing &= had or missing
    _print_names(show, f"patched modules that {os.pathsep.join(folders)} lacks", missing)
    if missing:
        show(
            f"If {release} has these modules, the folder is not all of it: name one that has them before it, as in "
            "--against CHECKOUT:FOLDER",
        )


def _print_names(show: Show, what: str, names: Collection[str]) -> None:
    show(f"{what}: {len(names)}")
    for name in sorted(names):
        show(f"    {name}")
