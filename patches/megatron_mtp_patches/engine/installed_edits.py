"""The edits that are in Megatron's modules now, and which patches asked for each."""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType

from .added_fields import AddedFields
from .copies import Copies
from .declare import AddField, Edit, Patch, PatchError
from .patched_attribute import PatchedAttribute


class InstalledEdits:
    """Puts each edit in once, for however many patches, and takes it out when the last of them no longer wants it.

    An edit whose target this Megatron lacks is noted, too.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._fields = AddedFields()
        self._attributes: dict[str, PatchedAttribute] = {}  # by target
        self._asked_by: dict[Edit, list[str]] = {}  # ids of patches

    def __contains__(self, edit: Edit) -> bool:
        return edit in self._asked_by

    def is_installed(self, edit: Edit, patch: Patch) -> bool:
        """Whether `edit` is in for the sake of `patch`."""
        return patch.id in self._asked_by.get(edit, ())

    def lacks_target(self, edit: Edit) -> bool:
        """Whether `edit` was noted without anything to change: the module has another object in place of its class."""
        return not isinstance(edit, AddField) and edit.target not in self._attributes

    def asking_for(self, targets: Collection[str]) -> set[str]:
        """The ids of the patches that asked for an edit of one of `targets`."""
        return {id for edit, ids in self._asked_by.items() if edit.target in targets for id in ids}

    def attribute(self, target: str) -> PatchedAttribute:
        """The attribute that edits of `target` are stacked on."""
        return self._attributes[target]

    def add(self, edit: Edit, patch: Patch, module: ModuleType, target_exists: bool) -> None:
        """Put `edit` into `module`, unless it is there already, for the sake of `patch`."""
        if edit not in self and target_exists:
            if isinstance(edit, AddField):
                self._fields.add(getattr(module, edit.name), edit)
            else:
                if edit.target not in self._attributes:
                    self._attributes[edit.target] = PatchedAttribute(module, edit.name, self._copies)
                self._attributes[edit.target].add(edit)
        self._asked_by.setdefault(edit, []).append(patch.id)

    def remove_for(self, patch: Patch) -> list[str]:
        """Take out what no other patch wants. What cannot be taken out stays noted; the answer says why not."""
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
        self._asked_by.clear()

    def changed_since(self, edit: Edit) -> list[str]:
        """The places of `edit` that no longer hold what it put there."""
        if isinstance(edit, AddField):
            return self._fields.changed_since(edit)
        attribute = self._attributes.get(edit.target)
        return [edit.target] if attribute is not None and attribute.is_changed_since else []

    def forget_if_executed_again(self, module: ModuleType) -> bool:
        """Whether `module` was executed again, which undid its edits: they are no longer noted."""
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

    def _remove(self, edit: Edit) -> None:
        if isinstance(edit, AddField):
            self._fields.remove(edit)
        elif edit.target in self._attributes and edit in self._attributes[edit.target].edits:
            self._attributes[edit.target].remove(edit)
