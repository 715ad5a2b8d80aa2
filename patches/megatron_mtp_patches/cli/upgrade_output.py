"""What `upgrade` prints for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from ..doctor.findings import Finding
from ..parity.upgrade.comparison import Change, Comparison
from ..parity.upgrade.reading import CONFIGURATIONS, Reading
from .doctor_output import show_findings

if TYPE_CHECKING:
    from ..parity.upgrade.numbers import CutNumbers, Functions

SHOWN = 4  # deviations of a cut
Show = Callable[..., None]


def show_comparison(show: Show, readings: Iterable[Reading], comparison: Comparison) -> None:
    for word, reading in zip(("from", "to  "), readings, strict=True):
        show(f"{word} {reading.megatron}; {reading.transformer_engine}")
    for flag in comparison.unknown:
        show(f"the newer Megatron does not know {flag}", "red")
    for title, findings in (("come", comparison.new), ("go", comparison.gone)):
        show(f"\nKnown defects of this run that {title}: {len(findings)}", "bold")
        show_findings(show, (Finding(**one) for one in findings))
    left = sum(not one["is_removed"] for one in comparison.shared)
    show(f"In both: {len(comparison.shared)}, of which the patches leave {left} (`doctor -- FLAGS` names them)")
    changed = _show_title(show, "Settings of this run with another value", comparison.changed)
    for one in _in_order(changed):
        show(f"* {one.name} ({one.part}): {one.before} -> {one.after}")
    _show_by_part(show, _show_title(show, "New settings that are on or have a value", comparison.added))
    _show_by_part(show, _show_title(show, "Settings that are gone and were on or had a value", comparison.dropped))
    show(f"\nPatches that become superfluous: {len(comparison.superfluous)}", "bold")
    removing = {one["patch"] for one in comparison.gone}
    for name in filter(removing.__contains__, comparison.superfluous):
        show(f"* {name} (it removes a defect of this run)")
    if others := [name for name in comparison.superfluous if name not in removing]:
        show(f"* without a defect of this run: {', '.join(others)}")


def _show_title(show: Show, title: str, changes: list[Change]) -> list[Change]:
    """Print a title with numbers; return those of the changes that are shown under it."""
    on = [one for one in changes if not one.is_off]
    shown = [one for one in on if one.is_used]
    others = [(len(changes) - len(on), "are off"), (len(on) - len(shown), "belong to features that it does not use")]
    beside = " and ".join(f"{count} that {what}" for count, what in others if count)
    show(f"\n{title}: {len(shown)}{beside and f', beside {beside}'}", "bold")
    return shown


def _in_order(changes: Iterable[Change]) -> list[Change]:
    """Those of the model, of the optimizer and of data parallelism first."""
    parts = [*CONFIGURATIONS, "trainer"]
    return sorted(changes, key=lambda change: parts.index(change.part))


def _show_by_part(show: Show, changes: Iterable[Change]) -> None:
    for part, several in groupby(_in_order(changes), key=lambda change: change.part):
        show(f"* {part}: {', '.join(f'{one.name} {one.before or one.after}' for one in several)}")


def show_numbers(show: Show, cuts: Iterable[CutNumbers], functions: Functions) -> None:
    """Print the numbers of a run made small in both Megatrons."""
    from .parity_output import describe_beginning

    show("\nThe run made small, with the same weights and samples in both:", "bold")
    for cut in cuts:
        if any(cut.refusals):
            sides = ("from", cut.refusals[0]), ("to", cut.refusals[1])
            show(f"{cut.name}: does not train: {'; '.join(f'{side}: {why}' for side, why in sides if why)}", "yellow")
            if not all(cut.refusals):
                _show_defects(show, cut)
            continue
        answer = f"{len(cut.deviations)} quantities differ" if cut.deviations else "equal"
        show(f"{cut.name}: {answer}", "bold red" if cut.deviations else "green")
        for step, line in enumerate(cut.lines, 1):
            show(f"    step {step}: {', '.join(_side_by_side(name, *values) for name, values in line.items())}")
        for one in cut.deviations[:SHOWN]:
            show(f"    {one}")
        if cut.deviations:
            show(f"    {describe_beginning(cut.begins)}")
            _show_defects(show, cut)
    show(
        f"Functions of Megatron that ran on one rank: {len(functions.changed)} with another source, "
        f"{len(functions.new)} only in the newer one, {len(functions.gone)} only in the older one",
        "bold",
    )
    for module, several in groupby(functions.changed, key=lambda name: name.partition(":")[0]):
        show(f"* {module}: {', '.join(name.partition(':')[2] for name in several)}")


def _show_defects(show: Show, cut: CutNumbers) -> None:
    for one in cut.defects:
        show(f"    known, in the {one.has_it} Megatron alone: {one.id}: {one.text}")
    if not cut.defects:
        show("    no known defect of this cut is in one of the two Megatrons alone")


def _side_by_side(name: str, before: float | None, after: float | None) -> str:
    return f"{name} {before}" if before == after else f"{name} {before} -> {after}"
