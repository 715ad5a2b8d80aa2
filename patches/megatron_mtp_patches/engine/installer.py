"""Decides what becomes of each patch and installs it: all of its edits, or none."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import ModuleType

from .added_fields import AddedFields
from .copies import Copies
from .decision import Decision, decide, read_sources
from .declare import AddField, Edit, Patch, PatchError
from .fingerprints import KnownSources, target_exists
from .patched_attribute import PatchedAttribute, is_bound, owner_is_class
from .project import Project
from .selection import REPAIRS, Selection
from .state import State


class Installer:
    """The decisions and the installed edits since the last `apply()`.

    Each edit is put in once, for however many patches, and taken out when the last of them no longer wants it. An edit
    whose target is missing here is also noted. The patches of `base` and `added` cannot be left out. Edits of one
    target are stacked in the order of the patches.
    """

    def __init__(
        self,
        project: Project,
        catalog: tuple[Patch, ...],
        base: tuple[Patch, ...],
        selection: Selection,
        on_drift: str,
        table_file: str,
        added: tuple[Patch, ...] = (),
    ) -> None:
        self._project = project
        self._table_file = table_file
        self.catalog = catalog
        self.base = base
        self.selection = selection
        self.on_drift = on_drift
        self.copies = Copies()
        self._fields = AddedFields()
        self._attributes: dict[str, PatchedAttribute] = {}  # by target
        self._asked_by: dict[Edit, list[str]] = {}  # ids of patches
        self._decisions: dict[str, Decision] = {}
        self._warned: dict[str, str] = {}  # id: why it is refused, without its id
        self.set_added(added)

    @cached_property
    def known_sources(self) -> KnownSources:
        """Read, as are the sources of Megatron, only where something is to be decided."""
        read_sources(patch for patch in self.catalog if patch.id in self.selection.ids)
        return KnownSources.read(Path(self._table_file))

    def set_added(self, added: tuple[Patch, ...]) -> None:
        """Set the patches that wrap around all others."""
        self.added = added
        self._patches_by_module: dict[str, list[Patch]] = {}  # by the modules that they touch
        for patch in (*self.base, *self.catalog, *self.added):  # innermost first
            for module in patch.modules:
                self._patches_by_module.setdefault(module, []).append(patch)

    # -- deciding -----------------------------------------------------------------------------------------------

    def decision(self, patch: Patch) -> Decision:
        """Return the decision about `patch`.

        It is read from the source once that is there, so it stays true while modules are imported.
        """
        decision = self._decisions.get(patch.id)
        if decision is None or decision.state is State.PENDING:
            decision = self._decisions[patch.id] = self._decide(patch)
        return decision

    def _decide(self, patch: Patch) -> Decision:
        if patch in (*self.base, *self.added):
            return Decision(State.APPLIED, "always")
        variable = self._project.choice_variable
        if patch.id not in self.selection.ids:
            return Decision(State.DISABLED, f"left out by {variable}")
        decision = decide(patch, self.known_sources, self._project)
        is_chosen = self.selection.profile != REPAIRS or patch.id in self.selection.named
        if is_chosen or patch.is_repair or decision.state in (State.REPAIRED, State.NATIVE):
            return decision
        words = ",".join((REPAIRS, *sorted(self.selection.named), patch.id))
        return Decision(State.DISABLED, f"left out by {variable}={REPAIRS}; write {words} to add it to the repairs")

    def _decide_again(self, patch: Patch) -> None:
        """A module that was executed again may have another source now."""
        if self.decision(patch).installs:
            del self._decisions[patch.id]
            if not self.decision(patch).installs:
                self._remove_for(patch)

    def implementation_modules(self, module: str) -> list[str]:
        """The modules of the overrides and wrappers that the edits of `module` need."""
        patches = [patch for patch in self._patches_by_module.get(module, ()) if self.decision(patch).installs]
        edits = [edit for patch in patches for edit in patch.edits if edit.module == module and edit.implementation]
        return list(dict.fromkeys(edit.implementation_module for edit in edits))

    def has_missing_edits(self, module: str) -> bool:
        """True if an edit of `module` that should be there is not."""
        return any(
            edit.module == module and not self.is_installed(edit, patch) and self._target_exists(edit)
            for patch in self._patches_by_module.get(module, ())
            if self.decision(patch).installs
            for edit in patch.edits
        )

    def _target_exists(self, edit: Edit) -> bool:
        """For the base the imported module is asked first: then no source is read where every patch is left out."""
        module = sys.modules.get(edit.module)
        if module is not None and any(edit in patch.edits for patch in self.base):
            return is_bound(module, edit.needed_name) or target_exists(edit)
        return target_exists(edit)

    # -- installing ---------------------------------------------------------------------------------------------

    def install_into(self, module: ModuleType, import_errors: Mapping[str, Exception]) -> None:
        """Install what the patches want of `module`. A patch that fails is taken out of every module.

        Nothing is imported here, where the engine's lock is held.

        Args:
            import_errors: by the name of an override's module, why it could not be imported.

        Raises:
            PatchError: a patch is refused, and the user wants that to be an error. The others are installed.
        """
        patches = self._patches_by_module.get(module.__name__, [])
        if self._forget_if_executed_again(module):
            for patch in patches:
                self._decide_again(patch)
        errors = []
        for patch in patches:
            try:
                self._install_edits_of(patch, module, import_errors)
            except PatchError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _install_edits_of(self, patch: Patch, module: ModuleType, import_errors: Mapping[str, Exception]) -> None:
        decision = self.decision(patch)
        if decision.state is State.REFUSED:
            self._raise_or_warn(patch, decision.reason)
        if not decision.installs:
            return
        try:
            for edit in patch.edits:
                if edit.module == module.__name__ and not self.is_installed(edit, patch):
                    if edit.implementation_module in import_errors:
                        raise import_errors[edit.implementation_module]
                    self._add(edit, patch, module)
        except Exception as error:
            self._refuse(patch, str(error) if isinstance(error, PatchError) else f"{module.__name__}: {error!r}", error)

    def _add(self, edit: Edit, patch: Patch, module: ModuleType) -> None:
        """Put `edit` into `module`, unless it is there already, for the sake of `patch`."""
        if edit not in self._asked_by:
            exists = self._target_exists(edit)
            if not exists and any(edit in always.edits for always in (*self.base, *self.added)):
                self._warn(f"this {self._project.library} has no {edit.target}, on which it relies")
            if exists and owner_is_class(edit, module):
                if isinstance(edit, AddField):
                    self._fields.add(getattr(module, edit.name), edit)
                else:
                    if edit.target not in self._attributes:
                        attribute = PatchedAttribute(module, edit.name, self.copies, self._project)
                        self._attributes[edit.target] = attribute
                    self._attributes[edit.target].add(edit)
        self._asked_by.setdefault(edit, []).append(patch.id)

    def _forget_if_executed_again(self, module: ModuleType) -> bool:
        """True if `module` was executed again, which undid its edits: they are no longer noted."""
        gone = [edit for edit in self._asked_by if edit.module == module.__name__ and self._is_gone(edit, module)]
        for edit in gone:
            del self._asked_by[edit]
            self._attributes.pop(edit.target, None)
        return bool(gone)

    def _is_gone(self, edit: Edit, module: ModuleType) -> bool:
        if isinstance(edit, AddField):
            return not self._fields.has(getattr(module, edit.name, None))
        attribute = self._attributes.get(edit.target)
        return attribute is None or attribute.is_gone(module)

    def rebind_copies(self) -> None:
        """Rebind the copies of what was replaced, in one scan. Where that fails, the patches are taken out.

        Raises:
            PatchError: a patch was taken out, and the user wants that to be an error.
        """
        targets = self.copies.places
        try:
            self.copies.follow_all()
        except Exception as error:
            asking = {id for edit, ids in self._asked_by.items() if edit.target in targets for id in ids}
            errors = []
            for patch in (*self.base, *self.catalog):
                if patch.id in asking:
                    try:
                        self._refuse(patch, f"the copies of {', '.join(targets)}: {error!r}", error)
                    except PatchError as refused:
                        errors.append(refused)
            with suppress(Exception):  # it fails as before, and the other modules are done
                self.copies.follow_all()
            if errors:
                raise errors[0] from error

    # -- installed edits ----------------------------------------------------------------------------------------

    def is_installed(self, edit: Edit, patch: Patch) -> bool:
        """True if `edit` is in for the sake of `patch`."""
        return patch.id in self._asked_by.get(edit, ())

    def lacks_target(self, edit: Edit) -> bool:
        """True if `edit` was noted without anything to change: the module has another object in place of its class."""
        return not isinstance(edit, AddField) and edit.target not in self._attributes

    def changed_since(self, edit: Edit) -> list[str]:
        """The places of `edit` that no longer hold what it put there."""
        if isinstance(edit, AddField):
            return self._fields.changed_since(edit)
        attribute = self._attributes.get(edit.target)
        return [edit.target] if attribute is not None and attribute.is_changed_since else []

    # -- taking out ---------------------------------------------------------------------------------------------

    def uninstall(self, patch: Patch) -> None:
        """Take out what was installed for `patch` alone, and forget what was decided of it."""
        self._remove_for(patch)
        self._decisions.pop(patch.id, None)

    def remove_all(self) -> None:
        """Raises PatchError, before anything is removed, where another library has changed the same since."""
        changed = [place for edit in self._asked_by for place in self.changed_since(edit)]
        if changed:
            raise PatchError(
                f"{', '.join(dict.fromkeys(changed))} was changed by another library after these patches were "
                f"applied; undo that first. Until then these patches stay as they are"
            )
        for edit in reversed(list(self._asked_by)):
            self._remove(edit)

    def _remove_for(self, patch: Patch) -> list[str]:
        """Uninstall the edits that this patch alone uses; return why some could not be, which stay registered."""
        problems = []
        for edit in reversed([edit for edit, ids in self._asked_by.items() if patch.id in ids]):
            self._asked_by[edit].remove(patch.id)
            if not self._asked_by[edit]:
                try:
                    self._remove(edit)
                    del self._asked_by[edit]
                except PatchError as error:
                    problems.append(str(error))
        return problems

    def _remove(self, edit: Edit) -> None:
        if isinstance(edit, AddField):
            self._fields.remove(edit)
        elif edit.target in self._attributes and edit in self._attributes[edit.target].edits:
            self._attributes[edit.target].remove(edit)

    def _refuse(self, patch: Patch, reason: str, cause: Exception) -> None:
        """Take out `patch`, which cannot be installed whole."""
        reason = ". ".join([reason, *self._remove_for(patch)])
        self._decisions[patch.id] = Decision(State.REFUSED, reason)
        self._raise_or_warn(patch, reason, cause)

    def _raise_or_warn(self, patch: Patch, reason: str, cause: Exception | None = None) -> None:
        is_asked_for = not patch.is_repair or patch.id in self.selection.named
        if patch in self.added or (self.on_drift == "raise" and is_asked_for):
            raise PatchError(f"{patch.id} is refused: {reason}") from cause
        if self.on_drift != "skip" and patch.id not in self._warned:
            common = reason.replace(patch.id, "")
            alike = next((id for id, other in self._warned.items() if other == common), None)
            self._warned[patch.id] = common
            why = f"for the same reason as {alike} is: {reason.partition('. ')[0]}" if alike else reason
            self._warn(f"{patch.id} is refused, and the run goes on without it: {why}")

    def _warn(self, message: str) -> None:
        warnings.warn(f"{self._project.package}: {message}", stacklevel=3)
