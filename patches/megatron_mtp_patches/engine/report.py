"""Reports on the patches: one for each, and one line that identifies all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .decision import Decision
from .declare import Edit, Patch
from .fingerprints import fingerprint, target_exists
from .selection import ALL
from .state import State, TargetState

if TYPE_CHECKING:
    from .installer import Installer

_LEFT_OUT = Decision(State.DISABLED, "left out")


@dataclass(frozen=True)
class Report:
    """The state of one patch in this process.

    Attributes:
        id: what the user calls the patch.
        state: pending, applied, repaired, native, disabled or refused.
        reason: why, in a sentence.
        upstream: the upstream changes that it brings, as `#number`.
        summary: what it does, in a line.
        targets: {`module:name`: where this target stands}.
    """

    id: str
    state: State
    reason: str
    upstream: tuple[str, ...]
    summary: str
    targets: dict[str, TargetState]


def report_on(patch: Patch, installer: Installer | None) -> Report:
    """Return the state of `patch`, with its reason and targets. Without an installer nothing is applied."""
    decision = installer.decision(patch) if installer else _LEFT_OUT
    targets = {edit.target: _target_state(edit, patch, installer) for edit in patch.edits}
    state, reason = decision.state, decision.reason
    if decision.installs and {TargetState.APPLIED, TargetState.CHANGED}.isdisjoint(targets.values()):
        state, reason = State.PENDING, f"{reason}; waits for the import of {patch.modules[0]}"
    return Report(patch.id, state, reason, tuple(map(str, patch.upstream)), patch.summary, targets)


def _target_state(edit: Edit, patch: Patch, installer: Installer | None) -> TargetState:
    if installer is None or installer.decision(patch).state in (State.NATIVE, State.DISABLED, State.REFUSED):
        return TargetState.UNTOUCHED
    if not target_exists(edit):
        return TargetState.ABSENT
    if not installer.is_installed(edit, patch):
        return TargetState.PENDING
    if installer.lacks_target(edit):
        return TargetState.ABSENT
    return TargetState.CHANGED if installer.changed_since(edit) else TargetState.APPLIED


def identify(catalog: Iterable[Patch], installer: Installer | None) -> str:
    """One line: what has been decided of each patch, and a hash of the sources of those that are not left out."""
    decided = [(patch, installer.decision(patch).state if installer else State.DISABLED) for patch in catalog]
    states = " ".join(f"{patch.id}={state}" for patch, state in decided)
    examined = [patch for patch, state in decided if state is not State.DISABLED]
    edits = [edit for patch in examined for edit in patch.edits if edit.check_source]
    sources = hashlib.sha256("".join(map(fingerprint, edits)).encode()).hexdigest()[:8]
    profile = f"profile={installer.selection.profile} " if installer and installer.selection.profile != ALL else ""
    return f"{profile}{states} sources={sources}"


def states_in(record: str) -> dict[str, State]:
    """{id of a patch: its state} of a line that begins with a version and goes on as `identify` has it."""
    words = (word.partition("=") for word in record.split()[1:-1])
    return {id: State(state) for id, _, state in words if id != "profile"}
