"""Puts the edits of patches into modules, all edits of a patch or none, and says where each patch stands."""

from __future__ import annotations

import hashlib
import sys
import warnings
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType

from .copies import Copies
from .decide import Decision, Verdict, decide
from .declare import AddField, Edit, Patch, PatchError
from .fields import Fields
from .fingerprints import Table, fingerprint, has_place, open_table
from .questions import ask_existence, is_checked
from .report import Report
from .slots import Slot, is_bound

NO_PLACE = "not in this Megatron"
CHANGED = "applied, then changed by somebody else"


class Installer:
    """What has been decided and installed since the set was last applied.

    The patches of `base` and `added` cannot be left out. Edits of one target are stacked in the order of `patches`.
    """

    def __init__(
        self,
        catalog: tuple[Patch, ...],
        base: tuple[Patch, ...],
        selected: frozenset[str],
        on_drift: str,
        table_file: str,
        added: tuple[Patch, ...] = (),
    ) -> None:
        self._table_file = table_file
        self.catalog = catalog
        self.base = base
        self.selected = selected
        self.on_drift = on_drift
        self.copies = Copies()
        self._decisions: dict[str, Decision] = {}
        self._slots: dict[str, Slot] = {}
        self._fields = Fields()
        self._installed: dict[Edit, list[str]] = {}  # edit -> ids of the patches that asked for it
        self._complained: set[str] = set()
        self.set_added(added)

    @cached_property
    def table(self) -> Table:
        """Read only where something is to be decided."""
        return open_table(Path(self._table_file), (*self.base, *self.catalog))

    def set_added(self, added: tuple[Patch, ...]) -> None:
        """Say which patches lie around all others."""
        self.added = added
        self._patches_of: dict[str, list[Patch]] = {}  # by the modules that they touch
        for patch in self.patches:
            for module in patch.modules:
                self._patches_of.setdefault(module, []).append(patch)

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All patches, innermost first."""
        return (*self.base, *self.catalog, *self.added)

    def decision(self, patch: Patch) -> Decision:
        """What is to become of `patch`; read from the source once, so it stays true while modules arrive."""
        if patch.id not in self._decisions:
            if patch in (*self.base, *self.added):
                self._decisions[patch.id] = Decision(Verdict.ADD, "always")
            elif patch.id not in self.selected:
                self._decisions[patch.id] = Decision(Verdict.DISABLED, "left out")
            else:
                self._decisions[patch.id] = decide(patch, self.table)
        return self._decisions[patch.id]

    # -- installing ---------------------------------------------------------------------------------------------

    def install_into(self, module: ModuleType) -> None:
        """Install what the patches want of `module`. A patch that fails is withdrawn from every module.

        Raises:
            PatchError: a patch is refused, and that shall be an error. The others are installed all the same.
        """
        here = self._patches_of.get(module.__name__, [])
        gone = [edit for edit in self._installed if edit.module == module.__name__ and self._is_gone(edit, module)]
        for edit in gone:
            del self._installed[edit]
            self._slots.pop(edit.target, None)
        for patch in here if gone else ():
            self._decide_anew(patch)
        errors = []
        for patch in here:
            try:
                self._install(patch, module)
            except PatchError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _decide_anew(self, patch: Patch) -> None:
        """A module that was executed anew may have another source now."""
        if self.decision(patch).installs:
            del self._decisions[patch.id]
            if not self.decision(patch).installs:
                self._withdraw(patch)

    def homes_for(self, module: str) -> list[str]:
        """The modules that the edits of `module` need."""
        patches = [patch for patch in self._patches_of.get(module, ()) if self.decision(patch).installs]
        homes = [edit.home for patch in patches for edit in patch.edits if edit.home and edit.module == module]
        return list(dict.fromkeys(homes))

    def _is_gone(self, edit: Edit, module: ModuleType) -> bool:
        """Whether `module` was executed anew since, which undoes what was installed into it."""
        if isinstance(edit, AddField):
            return not self._fields.knows(getattr(module, edit.name, None))
        slot = self._slots.get(edit.target)
        return slot is None or slot.is_gone(module)

    def has_missed(self, module: str) -> bool:
        """Whether an edit of `module` that should be there is not."""
        return any(
            edit.module == module and patch.id not in self._installed.get(edit, ()) and self._has_place(edit)
            for patch in self._patches_of.get(module, ())
            if self.decision(patch).installs
            for edit in patch.edits
        )

    def _has_place(self, edit: Edit) -> bool:
        """For the base the imported module is asked first: then no source is read where every patch is left out."""
        module = sys.modules.get(edit.module)
        if module is not None and any(edit in patch.edits for patch in self.base):
            return is_bound(module, ask_existence(edit).name) or has_place(edit)
        return has_place(edit)

    def remove_all(self) -> None:
        """Raises PatchError, before anything is removed, where somebody has changed the same after these patches."""
        changed = [place for edit in self._installed for place in self._changed_since(edit)]
        if changed:
            raise PatchError(
                f"{', '.join(dict.fromkeys(changed))} was changed by somebody else after these patches were applied; "
                f"undo that first. Until then these patches stay as they are"
            )
        for edit in reversed(list(self._installed)):
            self._remove(edit)
        self._installed.clear()

    def withdraw(self, patch: Patch) -> None:
        """Take out what was installed for `patch` alone, and forget what was decided of it."""
        self._withdraw(patch)
        self._decisions.pop(patch.id, None)

    def _install(self, patch: Patch, module: ModuleType) -> None:
        decision = self.decision(patch)
        if decision.verdict is Verdict.REFUSED:
            self._complain(patch, decision.reason)
        if not decision.installs:
            return
        try:
            for edit in patch.edits:
                if edit.module == module.__name__ and patch.id not in self._installed.get(edit, ()):
                    self._add(edit, module)
                    self._installed.setdefault(edit, []).append(patch.id)
        except Exception as error:
            self._give_up(
                patch, str(error) if isinstance(error, PatchError) else f"{module.__name__}: {error!r}", error
            )

    def settle_copies(self) -> None:
        """Let the copies of what was replaced follow, in one scan. Where that fails, the patches are withdrawn.

        Raises:
            PatchError: a patch was withdrawn, and that shall be an error.
        """
        places = self.copies.places
        try:
            self.copies.follow_all()
        except Exception as error:
            asking = {id for edit, ids in self._installed.items() if edit.target in places for id in ids}
            errors = []
            for patch in (*self.base, *self.catalog):
                if patch.id in asking:
                    try:
                        self._give_up(patch, f"the copies of {', '.join(places)}: {error!r}", error)
                    except PatchError as refused:
                        errors.append(refused)
            with suppress(Exception):  # it fails as before, and the other modules are done
                self.copies.follow_all()
            if errors:
                raise errors[0] from error

    def _give_up(self, patch: Patch, reason: str, cause: Exception) -> None:
        """Take out `patch`, which cannot be installed whole."""
        reason = ". ".join([reason, *self._withdraw(patch)])
        self._decisions[patch.id] = Decision(Verdict.REFUSED, reason)
        self._complain(patch, reason, cause)

    def _complain(self, patch: Patch, reason: str, cause: Exception | None = None) -> None:
        message = f"{patch.id} is refused: {reason}"
        if self.on_drift == "raise" or patch in self.added:
            raise PatchError(message) from cause
        if self.on_drift == "warn" and patch.id not in self._complained:
            self._complained.add(patch.id)
            warnings.warn(f"megatron_mtp_patches: {message}", stacklevel=2)

    def _withdraw(self, patch: Patch) -> list[str]:
        """Take out what no other patch wants. What cannot be taken out stays in the books; why not is returned."""
        problems = []
        for edit in reversed([edit for edit, ids in self._installed.items() if patch.id in ids]):
            self._installed[edit].remove(patch.id)
            if not self._installed[edit]:
                try:
                    self._remove(edit)
                    del self._installed[edit]
                except PatchError as error:
                    problems.append(str(error))
        return problems

    def _add(self, edit: Edit, module: ModuleType) -> None:
        if edit in self._installed:
            return
        if not self._has_place(edit):
            if any(edit in patch.edits for patch in (*self.base, *self.added)):
                warnings.warn(
                    f"megatron_mtp_patches: this Megatron has no {edit.target}, on which it relies", stacklevel=2
                )
            return
        if isinstance(edit, AddField):
            self._fields.add(getattr(module, edit.name), edit)
        else:
            if edit.target not in self._slots:
                self._slots[edit.target] = Slot(module, edit.name, self.copies)
            self._slots[edit.target].add(edit)

    def _changed_since(self, edit: Edit) -> list[str]:
        """The places of `edit` in which there is something else now than what it put there."""
        if isinstance(edit, AddField):
            return self._fields.changed_since(edit)
        slot = self._slots.get(edit.target)
        return [edit.target] if slot is not None and slot.is_changed_since else []

    def _remove(self, edit: Edit) -> None:
        if isinstance(edit, AddField):
            self._fields.remove(edit)
        elif edit.target in self._slots and edit in self._slots[edit.target].edits:
            self._slots[edit.target].remove(edit)

    # -- telling ------------------------------------------------------------------------------------------------

    def report(self, patch: Patch) -> Report:
        decision = self.decision(patch)
        targets: dict[str, str] = {}
        for edit in patch.edits:
            if targets.get(edit.target, NO_PLACE) == NO_PLACE:  # of an Export and a Replace, one has its place
                targets[edit.target] = self._target_state(patch, edit)
        state, reason = decision.verdict.value, decision.reason
        if decision.installs and {"applied", CHANGED}.intersection(targets.values()):
            state = "repaired" if decision.verdict is Verdict.REPAIR else "applied"
        elif decision.installs:
            state, reason = "pending", f"{decision.reason}; waits for the import of {patch.modules[0]}"
        return Report(patch.id, state, reason, tuple(map(str, patch.upstream)), patch.summary, targets)

    def _target_state(self, patch: Patch, edit: Edit) -> str:
        if not self.decision(patch).installs:
            return "untouched"
        if not has_place(edit):
            return NO_PLACE
        if patch.id not in self._installed.get(edit, ()):
            return "pending"
        return CHANGED if self._changed_since(edit) else "applied"

    def record(self) -> str:
        """The verdict on each patch, and a hash of the sources of what is not left out, in one line."""
        verdicts = " ".join(f"{patch.id}={self.decision(patch).verdict.value}" for patch in self.catalog)
        looked_at = [patch for patch in self.catalog if self.decision(patch).verdict is not Verdict.DISABLED]
        edits = [edit for patch in looked_at for edit in patch.edits if is_checked(edit)]
        sources = hashlib.sha256("".join(map(fingerprint, edits)).encode()).hexdigest()[:8]
        return f"{verdicts} sources={sources}"
