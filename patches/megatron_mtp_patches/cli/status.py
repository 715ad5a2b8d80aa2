"""`status`: apply the patches to the installed Megatron and show the state of each."""

from __future__ import annotations

import dataclasses
import json
import sys
from operator import attrgetter

from rich.table import Column, Table

from .. import __version__, apply, rehearsal, status
from ..catalog import CATALOG
from ..defects.catalog import removed_by
from ..defects.probe import has_defect
from ..engine import Patch
from ..engine.report import Report
from ..engine.source import find_file
from ..engine.state import State, TargetState
from ..megatrons.installed import describe_megatron, find_releases, import_targets
from ..megatrons.known import VERSIONS
from ..megatrons.origins import describe_origin, describe_retirement, origin_of, retired_in
from ..megatrons.states_by_release import advice, state_in
from ..rehearsal import transformer_engine
from .console import make_console
from .zero_touch import describe_zero_touch

STYLES = {
    State.APPLIED: "green",
    State.REPAIRED: "green",
    State.NATIVE: "cyan",
    State.PENDING: "yellow",
    State.REFUSED: "red",
}
SELF_EXPLAINING = (State.APPLIED, State.REPAIRED, State.NATIVE)
_LAYERS = "megatron.core.transformer.multi_token_prediction"
# What a framework changes as soon as it is imported: by target, its package and what that means.
EXPECTED = {
    f"{_LAYERS}:MultiTokenPredictionLayer._checkpointed_forward": (
        "megatron.bridge",
        "expected under Megatron-Bridge 0.5.1: derive-mtp-labels loses nothing, recompute-quantized-mtp-heads has no "
        "effect",
    ),
    f"{_LAYERS}:MultiTokenPredictionBlock.forward": (
        "mcore_bridge",
        "expected under mcore-bridge: train-heads-in-mcore-bridge does what the patches did there",
    ),
    "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias": (
        "mcore_bridge",
        "expected under mcore-bridge: it gives the mask another shape, for the same count, and calls what was there",
    ),
}


def show_status(as_json: bool) -> int:
    """Print the table, or JSON; 1 if a patch is refused, not applied, or overwritten by a library that is not EXPECTED.

    Which libraries are known to overwrite what is in EXPECTED.
    """
    apply(on_drift="skip")  # a refused patch is a line of the table here, not an error
    if is_rehearsal := transformer_engine.available():  # without its kernels Megatron imports in a rehearsal only
        rehearsal.install(megatron_flags=False)
    failures = import_targets()
    reports = status()
    targets = [target for report in reports for target in report.targets.items()]
    overwritten = dict.fromkeys(target for target, state in targets if state is TargetState.CHANGED)
    if as_json:
        print(
            json.dumps(
                {
                    "version": __version__,
                    "megatron": describe_megatron(),
                    "zero_touch": describe_zero_touch(),
                    "patches": [
                        dataclasses.asdict(report) | _tell_need(patch)
                        for report, patch in zip(reports, CATALOG, strict=True)
                    ],
                    "not_imported": failures,
                },
                indent=1,
            )
        )
    else:
        console = make_console()
        console.print(f"megatron_mtp_patches {__version__}; {describe_megatron()}", soft_wrap=True)
        console.print(f"zero-touch: {describe_zero_touch()}", soft_wrap=True)
        if find_file("megatron.core") is None:
            return 1  # the line of the Megatron says what to install
        if is_rehearsal:
            console.print("TransformerEngine has no kernels here: this is the state in a rehearsal", soft_wrap=True)
        console.print(_make_table(reports))
        for reason in dict.fromkeys(failures.values()):
            modules = ", ".join(module for module in failures if failures[module] == reason)
            console.print(f"could not import {modules}: {reason}", style="yellow", soft_wrap=True)
        for line in _reasons(reports):
            console.print(line, soft_wrap=True)
        for target in overwritten:
            console.print(_describe_overwritten(target), style="red", soft_wrap=True)
    is_pending = any(state is TargetState.PENDING for _, state in targets)
    is_overwritten = not all(map(_is_expected, overwritten))
    return int(is_overwritten or is_pending or any(report.state is State.REFUSED for report in reports))


def _tell_need(patch: Patch) -> dict[str, object]:
    """Whose the patch is, until when it is needed, and how severe the defects of this Megatron are that it removes."""
    return {
        "origin": origin_of(patch),
        "whose": describe_origin(patch, "{}".format),
        "retired_in": retired_in(patch),
        "retire_when": describe_retirement(patch, "{}".format),
        "severity": max((defect.severity for defect in removed_by(patch) if has_defect(defect)), default=None),
    }


def show_retired(release: str) -> int:
    """Print which patches are superfluous in `release`, and which of those that it has are kept for their repairs.

    Those that are superfluous only after the installed Megatron are named once more.
    """
    rows = [(_first_with(patch, release), patch) for patch in CATALOG if state_in(patch, release) is not State.APPLIED]
    rows.sort(key=lambda row: VERSIONS.index(row[0]))
    console = make_console()
    console.print(f"What Megatron {release} has; it lacks the change of each other patch.", soft_wrap=True)
    for state, title in ((State.NATIVE, "superfluous"), (State.REPAIRED, "still needed, for their repairs")):
        table = Table(*(Column(column, overflow="fold") for column in ("from", "patch", "upstream", "what to do")))
        for first, patch in rows:
            if state_in(patch, release) is state:
                table.add_row(first, patch.id, " ".join(map(str, patch.upstream)), advice(patch, release))
        console.print(f"{title}: {table.row_count}")
        console.print(table)
    if here := find_releases():
        installed = max(here, key=VERSIONS.index)
        new = [
            patch.id
            for first, patch in rows
            if VERSIONS.index(first) > VERSIONS.index(installed) and state_in(patch, release) is State.NATIVE
        ]
        said = f"superfluous there and not yet in {installed}, which is installed here: {', '.join(new) or 'none'}"
        console.print(said, soft_wrap=True)
    return 0


def _first_with(patch: Patch, release: str) -> str:
    """The first Megatron in which the patch has the state that it has in `release`."""
    return next(one for one in VERSIONS if state_in(patch, one) is state_in(patch, release))


def _make_table(reports: list[Report]) -> Table:
    titles = ("patch", "state", "upstream", "targets")
    table = Table(*(Column(title, no_wrap=title != "upstream", overflow="fold") for title in titles))
    for report in reports:
        states = list(report.targets.values())
        here = len(states) - states.count(TargetState.ABSENT)
        done = f"{states.count(TargetState.APPLIED)} of {here}" if TargetState.UNTOUCHED not in states else "-"
        state = f"[{STYLES.get(report.state, 'dim')}]{report.state}[/]"
        if TargetState.CHANGED in states and TargetState.APPLIED not in states:
            state = "[red]overwritten[/]"
        table.add_row(report.id, state, " ".join(report.upstream), done)
    return table


def _reasons(reports: list[Report]) -> list[str]:
    """A line for each reason why patches are pending, disabled or refused; the other states explain themselves.

    Patches whose reasons differ in their own id alone share a line, which has ID in its place.
    """
    alike: dict[tuple[State, str], list[Report]] = {}
    for report in reports:
        if report.state not in SELF_EXPLAINING:
            alike.setdefault((report.state, report.reason.replace(report.id, "ID")), []).append(report)
    return [
        f"{', '.join(report.id for report in group)} ({state}): {reason if len(group) > 1 else group[0].reason}"
        for (state, reason), group in sorted(alike.items())
    ]


def _describe_overwritten(target: str) -> str:
    meaning = f" ({EXPECTED[target][1]})" if _is_expected(target) else ""
    return f"{target} was changed by {_find_library(target)} after the patches{meaning}"


def _is_expected(target: str) -> bool:
    return target in EXPECTED and f"{_find_library(target)}.".startswith(f"{EXPECTED[target][0]}.")


def _find_library(target: str) -> str:
    """The module of what stands at `target` now, where that is not Megatron's."""
    module, _, name = target.partition(":")
    owner = getattr(attrgetter(name)(sys.modules[module]), "__module__", module)
    return "another library" if owner == module else str(owner)
