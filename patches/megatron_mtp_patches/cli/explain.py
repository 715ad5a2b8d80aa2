"""`explain`: one patch and its state here, a known defect, or which code changes a function of Megatron's."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from .. import apply
from ..catalog import CATALOG
from ..declarations.description import setting_texts
from ..defects.catalog import known_defects, removed_by, span_of
from ..defects.declare import Defect
from ..defects.probe import has_defect
from ..engine import AddField, AddFlag, Patch, UsageError
from ..engine.declare import Edit
from ..engine.fingerprints import ABSENT, KnownSources, fingerprint
from ..engine.similar_names import did_you_mean
from ..engine.state import State
from ..megatron_engine import ENGINE
from ..megatrons.installed import describe_megatron, import_targets, known_sources
from ..megatrons.origins import describe_origin, describe_retirement
from ..reproductions.runner import has_program
from .console import make_console
from .places import places_of


def explain(patch: Patch) -> int:
    """Print the texts of the patch, its state and its edits; 1 if it is refused."""
    apply(on_drift="skip")
    import_targets()
    report = ENGINE.report(patch)
    console = make_console()
    console.print(f"[bold]{patch.id}[/]: {patch.summary}.", soft_wrap=True)
    console.print(f"Whose: {describe_origin(patch, '{} {}'.format)}.", markup=False, soft_wrap=True)
    console.print(f"Retire when: {describe_retirement(patch, '{}'.format)}.", markup=False, soft_wrap=True)
    for heading, paragraphs in sections(patch):
        console.print(f"\n[bold]{heading}[/]", soft_wrap=True)
        for paragraph in paragraphs:
            bullet = "* " if len(paragraphs) > 1 else ""
            console.print(Padding(Text(f"{bullet}{paragraph}"), (0, 0, 0, 2), expand=False))
    if setting_texts(patch):
        flags = Table("flag or config field", "default", "effect")
        for setting in setting_texts(patch):
            flags.add_row(setting.name, setting.default, setting.effect)
        console.print(flags)
    console.print(f"\n{describe_megatron()}\n[bold]{report.state}[/]: {report.reason}\n", soft_wrap=True)
    sources = known_sources()
    table = Table("edit", Column("target", overflow="fold"), "state", "source as in")
    for edit in patch.edits:
        table.add_row(_describe(edit), edit.target, report.targets[edit.target], _source_releases(edit, sources))
    console.print(table)
    _print_places(console, patch)
    return int(report.state is State.REFUSED)


def sections(patch: Patch) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(heading, paragraphs), for each text that the patch has."""
    is_native = any(change.native_since for change in patch.upstream)
    for heading, paragraphs in (
        ("Without it", (patch.problem,)),
        ("Found by `doctor`", tuple(map(_describe_defect, removed_by(patch)))),
        ("Not found by `doctor`", (patch.undetected,)),
        ("Adds", patch.adds),
        ("Upstream's change in part", tuple(change.part for change in patch.upstream if change.part)),
        ("Repairs, where native" if is_native else "Better than the pull request", patch.repairs),
        ("Refused at start", patch.refuses),
        ("Changes numbers", (patch.numerics,)),
        ("Without any of its settings", (patch.unasked,)),
        ("Turned off by", (patch.turned_off_by,)),
        ("Note", patch.notes),
    ):
        if any(paragraphs):
            yield heading, paragraphs


def _describe_defect(defect: Defect) -> str:
    left = f"; not removed with {defect.not_removed_with}" if defect.unless else ""
    return f"{defect.effect} ({span_of(defect)}{left})."


def explain_defect(defect: Defect) -> int:
    """Print what a known defect does, to which runs, whether the installed Megatron has it, and what removes it."""
    has_it = {True: "it has this defect", False: "it does not have it", None: "its source is not there"}
    lines = [
        f"{defect.id}, severity {defect.severity} ({defect.kind}): {defect.effect}.",
        f"It affects runs with: {defect.condition}.",
        f"Upstream: {defect.describe_upstream()}.",
        f"{describe_megatron()}: {has_it[has_defect(defect)]}.",
        f"Removed by {defect.patch}{defect.range_of_patch}: `megatron-mtp-patches explain {defect.patch}`."
        if defect.patch
        else f"No patch removes it; {defect.advice or 'no setting avoids it'}.",
    ]
    if has_program(defect.id):
        lines.append(f"`megatron-mtp-patches reproduce {defect.id}` shows it.")
    if defect.diff:
        lines.append(f"`megatron-mtp-patches export --diff {defect.id}` writes its repair into a patch file.")
    console = make_console()
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    _print_places(console, defect)
    return 0


def _print_places(console: Console, named: Patch | Defect) -> None:
    console.print()
    for kind, places in places_of(named).items():
        if places:
            console.print(f"{kind:<11} {', '.join(places)}", markup=False, soft_wrap=True)


def explain_function(name: str) -> int:
    """Print which patches change the functions or classes that end with `name`, and by which code.

    Raises:
        UsageError: no patch has that id or changes such a function.
    """
    changes = [(edit, patch) for patch in CATALOG for edit in patch.edits if _is_named(edit.target, name)]
    if not changes:
        functions = {edit.target.rpartition(":")[2] for patch in CATALOG for edit in patch.edits}
        names = (*functions, *(patch.id for patch in CATALOG), *(defect.id for defect in known_defects()))
        hint = did_you_mean(name.rpartition(":")[2], names)
        raise UsageError(
            f"explain {name!r}{hint}: no patch or known defect has this id, and no patch changes a function of this "
            f"name. `megatron-mtp-patches status` lists the patches, `audit` the defects, `drift` the functions"
        )
    table = Table(Column("function", overflow="fold"), "by", Column("code", overflow="fold"), "patch")
    rows = [(edit.target, _describe(edit), edit.implementation or "", patch.id) for edit, patch in changes]
    for row in dict.fromkeys(rows):  # a check of settings stands among the edits of each of them
        table.add_row(*row)
    make_console().print(table)
    return 0


def _is_named(target: str, name: str) -> bool:
    """True if `name` is `target` (package.module:Class.function), or the end of it from a dot or colon on."""
    return target == name or target.endswith((f".{name}", f":{name}"))


def _describe(edit: Edit) -> str:
    detail = {AddField: "field", AddFlag: "flag"}.get(type(edit))
    return f"{type(edit).__name__} {getattr(edit, detail)}" if detail else type(edit).__name__


def _source_releases(edit: Edit, sources: KnownSources) -> str:
    if not edit.check_source:
        return "any"
    digest = fingerprint(edit)
    releases = ", ".join(sources.releases_with(edit.target, digest))
    return releases or ("[red]missing[/]" if digest == ABSENT else "[red]unknown[/]")
