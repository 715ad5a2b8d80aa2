"""`explain ID`: what one patch does, and where it stands here."""

from __future__ import annotations

from rich.table import Column, Table

from .. import _engine, apply
from ..catalog import CATALOG
from ..engine import AddField, AddFlag
from ..engine.declare import Edit
from ..engine.fingerprints import ABSENT, KnownSources, fingerprint
from ..engine.state import State
from .console import make_console
from .megatron import describe_megatron, import_targets, known_sources


def explain(patch_id: str) -> int:
    """Print the patch's header, its state and its edits; 1 if it is refused."""
    patch = next(patch for patch in CATALOG if patch.id == patch_id)
    apply(on_drift="skip")
    import_targets()
    report = _engine.report(patch)
    console = make_console()
    header = (patch.doc or "(python -OO leaves out what is said here)").strip()
    console.print(f"[bold]{patch.id}[/]\n\n{header}\n", soft_wrap=True)
    for change in patch.upstream:
        console.print(f"{change.url}  {change.fate}")
    console.print(f"\n{describe_megatron()}\n[bold]{report.state}[/]: {report.reason}\n", soft_wrap=True)
    known = known_sources()
    table = Table("edit", Column("target", overflow="fold"), "state", "source as in")
    for edit in patch.edits:
        table.add_row(_describe(edit), edit.target, report.targets[edit.target], _known_as(edit, known))
    console.print(table)
    return int(report.state is State.REFUSED)


def _describe(edit: Edit) -> str:
    detail = {AddField: "field", AddFlag: "flag"}.get(type(edit))
    return f"{type(edit).__name__} {getattr(edit, detail)}" if detail else type(edit).__name__


def _known_as(edit: Edit, known: KnownSources) -> str:
    if not edit.check_source:
        return "any"
    digest = fingerprint(edit)
    releases = ", ".join(known.releases_with(edit.target, digest))
    return releases or ("[red]missing[/]" if digest == ABSENT else "[red]unknown[/]")
