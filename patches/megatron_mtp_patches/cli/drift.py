"""`drift`: which targets have a source that the patches were not written against."""

from __future__ import annotations

from pathlib import Path

from rich.table import Column, Table

from .. import _engine
from ..catalog import CATALOG
from ..engine import PatchError, UsageError
from ..engine.fingerprints import ABSENT, fingerprint, is_checked
from ..engine.source import find_file
from .console import make_console
from .megatron import describe_megatron


def show_drift(against: str | None, since: str | None = None) -> int:
    """Print each checked target and the releases that share its source; 1 if one is unknown.

    `against`: None reads the installed Megatron; a directory, the checkout or site-packages there; a known release
    asks which targets of the installed Megatron differ from that release. `since` asks it of a directory.
    """
    table = _engine.installer.table
    path, release = None, since
    if since not in (None, *table.releases):
        raise UsageError(f"--since {since!r}: the releases are {', '.join(table.releases)}")
    if against in (None, *table.releases) and find_file("megatron.core") is None:
        raise PatchError(describe_megatron())
    if against in table.releases:
        if since:
            raise UsageError("--since goes with a folder: --against FOLDER --since RELEASE")
        release = against
    elif against is not None:
        if not Path(against, "megatron", "core").is_dir():
            raise UsageError(
                f"{against!r} is neither a folder with megatron/core in it nor one of {', '.join(table.releases)}"
            )
        path = [against]
    differing = set()
    rows = Table(Column("target", overflow="fold"), "source as in")
    for patch in CATALOG:
        shown = []
        for edit in {edit.target: edit for edit in patch.edits if is_checked(edit)}.values():
            print_ = fingerprint(edit, path)
            releases = table.releases_with(edit.target, print_)
            same = release in releases if release else bool(releases)
            if not same:
                differing.add(edit.target)
            known = ", ".join(releases) or "no known release"
            text = f"absent; so in {known}" if print_ == ABSENT else known
            if not (same and release):  # what is as in that release was not asked for
                shown.append((edit.target, text if same else f"[red]{text}[/]"))
        if shown:
            rows.add_section()
            rows.add_row(f"[bold]{patch.id}[/]")
            for cells in shown:
                rows.add_row(*cells)
    console = make_console()
    what = f"differ from {release}" if release else "are not known"
    console.print(f"{against if path else describe_megatron()}: {len(differing)} targets {what}", soft_wrap=True)
    console.print(rows)
    return int(bool(differing))
