"""One attribute of a library: its original value, the edits stacked on it, and the value they make together."""

from __future__ import annotations

import functools
import importlib
import inspect
from types import CodeType, ModuleType
from typing import Any

from .copies import Copies
from .declare import AddFlag, Edit, Override, PatchError, Wrap
from .foreign_patches import find_foreign_patch
from .project import Project
from .source import ask, first_lines
from .wrappers import Wrapped, with_flag

MISSING = object()


class PatchedAttribute:
    """The attribute `name` of a module. Edits may come and go in any order: each time its value is built again."""

    def __init__(self, module: ModuleType, name: str, copies: Copies, project: Project) -> None:
        *self._parents, self.name = name.split(".")
        self.module = module
        self.qualified_name = name
        self._copies = copies
        self._project = project
        copies.follow(module)  # the name may be a copy of what has been replaced elsewhere
        self.owner: Any = functools.reduce(getattr, self._parents, module)
        self.original = self.value = vars(self.owner).get(self.name, MISSING)
        self.edits: list[Edit] = []
        self._override_modules: set[str] = set()

    def add(self, edit: Edit) -> None:
        self._check(edit)
        before = self.value
        self.edits.append(edit)
        if isinstance(edit, Override):
            self._override_modules.add(edit.implementation_module)
        try:
            self._rebuild()
        except BaseException:
            self.edits.remove(edit)
            self._put(before)
            raise

    def remove(self, edit: Edit) -> None:
        before = list(self.edits)
        self.edits.remove(edit)
        try:
            self._rebuild()
        except BaseException:
            self.edits = before
            raise

    def _check(self, edit: Edit) -> None:
        others = [other for other in self.edits if _replaces(other)]
        if _replaces(edit) and others:
            overrides = f"{others[0].implementation} and by {edit.implementation}"
            raise PatchError(f"{edit.target} is replaced by {overrides}; one override must serve both")
        if self.original is MISSING or not (edit.check_source or isinstance(edit, AddFlag)):
            return
        library = find_foreign_patch(self.original, self.module, deep=_replaces(edit))
        if library:
            raise PatchError(
                f"{edit.target} was already changed by {library}. Import {self._project.package} before it, or "
                f"leave out one of the two"
            )
        code = getattr(inspect.unwrap(self.original), "__code__", None)
        if edit.check_source and code is not None and not _code_matches_source(code, self.module.__name__):
            raise PatchError(
                f"{edit.target} does not run what is in {self.module.__file__} now, which these patches have checked: "
                f"that file was changed after it was imported or compiled. Start the process again; if that does not "
                f"help, delete the __pycache__ beside it"
            )

    def _rebuild(self) -> None:
        value = self.original
        for edit in sorted(self.edits, key=lambda edit: not isinstance(edit, Override)):
            value = _apply(edit, value)
        self._put(value)

    def is_gone(self, module: ModuleType) -> bool:
        """True if this attribute is no longer that of `module`, which was executed again."""
        owner: Any = module
        for name in self._parents:
            owner = getattr(owner, name, None)
        return owner is not self.owner or vars(owner).get(self.name, MISSING) is not self.value

    @property
    def is_changed_since(self) -> bool:
        """True if another library has put something else here since the last edit."""
        return self.value is not self.original and vars(self.owner).get(self.name, MISSING) is not self.value

    def _put(self, value: Any) -> None:
        if value is self.value:
            return
        if vars(self.owner).get(self.name, MISSING) is not self.value:
            raise PatchError(
                f"{self.module.__name__}:{self.qualified_name} was changed by another library after these patches "
                f"were applied; undo that first"
            )
        if value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)
        old, self.value = self.value, value
        if isinstance(self.owner, ModuleType) and old is not MISSING and value is not MISSING:
            self._copies.move(old, value, f"{self.module.__name__}:{self.qualified_name}", self._override_modules)


def _replaces(edit: Edit) -> bool:
    """True if a value that is there already gives way to the edit's override."""
    return isinstance(edit, Override) and edit.replaces


def _code_matches_source(code: CodeType, module: str) -> bool:
    """True if a function of that name begins in the same line of the source: the code may come from an older file."""
    lines = (ask(first_lines, module) or {}).get(code.co_name)
    return not lines or code.co_firstlineno in lines


def _apply(edit: Edit, value: Any) -> Any:
    """Return the value of the attribute after this edit."""
    if isinstance(edit, Override):
        return load(edit.override) if value is MISSING or _replaces(edit) else value
    if value is MISSING:
        raise PatchError(f"{edit.target} does not exist")
    if isinstance(edit, Wrap):
        return Wrapped(value, load(edit.wrapper))
    if isinstance(edit, AddFlag):
        return with_flag(value, edit)
    raise PatchError(f"{type(edit).__name__} does not fit {edit.target}")


def is_bound(module: ModuleType, name: str) -> bool:
    """True if the imported `module` has the qualified `name`."""
    try:
        functools.reduce(inspect.getattr_static, filter(None, name.split(".")), module)
    except AttributeError:
        return False
    return True


def owner_is_class(edit: Edit, module: ModuleType) -> bool:
    """True if the class whose attribute `edit` changes is a class in `module`; of other edits always.

    Where an optional package is not installed, a library may have None or a mock in the place of classes made from it.
    """
    owner, _, _ = edit.name.rpartition(".")
    return not owner or not is_bound(module, owner) or inspect.isclass(_follow(module, owner))


def _follow(module: ModuleType, name: str) -> Any:
    return functools.reduce(inspect.getattr_static, name.split("."), module)


def load(path: str) -> Any:
    """The object that `package.module:Qualified.name` names."""
    module, _, name = path.partition(":")
    return _follow(importlib.import_module(module), name)
