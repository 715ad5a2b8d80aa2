"""Applies a catalog of patches as the modules that they edit are imported, and takes them out again.

This much is loaded in every process that imports the package; the installer, only once there is a module to patch.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .declare import Edit, Patch
from .import_hook import being_imported, fully_imported, on_import
from .project import Project
from .report import Report, identify, report_on
from .selection import ALL, Selection, check_policy, extend, select

if TYPE_CHECKING:
    from .installer import Installer


class Engine:
    """The patches of `catalog`, of which the user selects some, and those of `base`, which always apply.

    A command may add base patches later: those wrap around all others, whenever the modules are imported.
    """

    def __init__(self, project: Project, catalog: Iterable[Patch], table_file: str, base: Iterable[Patch] = ()) -> None:
        self.project = project
        self.catalog = tuple(catalog)
        self.base = tuple(base)
        self.added: tuple[Patch, ...] = ()
        self.table_file = table_file
        # These last from apply() to revert().
        self._choice: tuple[Selection, str] | None = None  # what the user selected, and the policy on drift
        self._installer: Installer | None = None  # loaded when it is needed first
        self._postponed: dict[str, ModuleType] = {}  # modules that arrived before their overrides could be imported
        self._hooked: frozenset[str] = frozenset()
        self._lock = threading.RLock()
        self._thread = threading.local()

    @property
    def is_active(self) -> bool:
        """True if patches are applied to each module that is imported."""
        return self._choice is not None

    @property
    def modules(self) -> dict[str, None]:
        return dict.fromkeys(edit.module for edit in self._edits)

    @property
    def _edits(self) -> list[Edit]:
        return [edit for patch in (*self.base, *self.catalog, *self.added) for edit in patch.edits]

    def read_sources(self) -> None:
        """Read what the patches ask of the library's sources: forks of this process need not read it again."""
        from .decision import read_sources

        read_sources(self.catalog)

    # -- applying and reverting -----------------------------------------------------------------------------------

    def apply(self, choice: str, on_drift: str) -> None:
        """Patch what is imported already, and each further module as it arrives. See `selection` for the words."""
        with self._lock:
            selected = select(choice, [patch.id for patch in self.catalog], self.project)
            policy = check_policy(on_drift, self.project.drift_variable)
            self.revert()
            self._choice = selected, policy
        try:
            self._install_or_await(self.modules)
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Put every original back, copies made by `from x import y` included, and patch nothing further.

        Raises:
            PatchError: another library has changed the same after these patches; then nothing is put back.
        """
        with self._lock:
            installer = self._installer
            if installer:
                installer.remove_all()
            self._choice, self._installer, self._postponed = None, None, {}
            if installer:
                installer.copies.follow_all()

    def revert_earlier_import(self) -> None:
        """Revert what an engine of this table has applied whose package was taken out of sys.modules since.

        Raises:
            PatchError: as `revert`.
        """
        for finder in sys.meta_path:
            earlier: Any = getattr(getattr(finder, "callback", None), "__self__", None)
            if earlier is not self and getattr(earlier, "table_file", None) == self.table_file:
                earlier.revert()

    def add_base(self, patch: Patch) -> None:
        """Apply one more patch that the user cannot leave out, around all others.

        `revert()` takes it out with the others, and `apply()` puts it back; after a revert the addition waits for that.
        A patch that was added before stays as it is. A command relies on it, so its failure raises whatever the policy
        on drift.

        Raises:
            PatchError: a patch of the modules that it edits is refused; then it is not added, and leaves no edit.
        """
        with self._lock:
            if patch in (*self.base, *self.added):
                return
            self._set_added((*self.added, patch))
        try:
            self._install_or_await(patch.modules)
        except BaseException:
            with self._lock:
                if self._installer:
                    self._installer.uninstall(patch)
                self._set_added(tuple(other for other in self.added if other != patch))
            raise

    def install_missed_modules(self) -> None:
        """Patch what was imported past the hook: by a finder that comes before ours, or while `apply()` ran."""
        for name in fully_imported(self.modules):
            with self._lock:
                installer = self._load_installer()
                lacks_edits = installer is not None and installer.has_missing_edits(name)
            if lacks_edits:
                self._on_import(sys.modules[name])

    # -- reporting --------------------------------------------------------------------------------------------------

    def report(self, patch: Patch) -> Report:
        """Return the state of `patch`, with its reason and targets."""
        with self._lock:
            return report_on(patch, self._load_installer())

    def choice_with(self, patches: Iterable[str]) -> str:
        """Return the choice of patches that is in force and these: for `apply()`, and for the variable."""
        with self._lock:
            selection = self._choice[0] if self._choice else Selection(frozenset(), ALL)
            return extend(selection, patches, (patch.id for patch in self.catalog))

    def record(self) -> str:
        """One line that identifies the patches, the state of each, and the sources that were found."""
        with self._lock:
            return identify(self.catalog, self._load_installer())

    # -- modules ----------------------------------------------------------------------------------------------------

    def _load_installer(self) -> Installer | None:
        """The installer of this choice; None while nothing is applied."""
        if self._installer is None and self._choice is not None:
            from .installer import Installer

            self._installer = Installer(
                self.project, self.catalog, self.base, *self._choice, self.table_file, self.added
            )
        return self._installer

    def _set_added(self, patches: tuple[Patch, ...]) -> None:
        self.added = patches
        if self._installer:
            self._installer.set_added(patches)

    def _install_or_await(self, modules: Iterable[str]) -> None:
        """Patch those of `modules` that are imported, and from now on each that is imported while patches apply."""
        with self._lock:
            names = frozenset({*self.modules, *(edit.implementation_module for edit in self._edits)})
            new, self._hooked = names - self._hooked, names | self._hooked
        if new:
            on_import(new, self._on_import)
        with self._rebinding_copies():
            for name in fully_imported(modules):
                self._patch(sys.modules[name])

    def _on_import(self, module: ModuleType) -> None:
        with self._rebinding_copies():
            self._patch(module)

    @contextmanager
    def _rebinding_copies(self) -> Iterator[None]:
        """Afterwards rebind the copies of what was replaced, once for all that this thread has imported within."""
        is_outermost = not getattr(self._thread, "is_nested", False)
        self._thread.is_nested = True
        try:
            yield
        finally:
            if is_outermost:
                self._thread.is_nested = False
                with self._lock:
                    if self._installer:
                        self._installer.rebind_copies()

    def _patch(self, module: ModuleType) -> None:
        """Install into `module`, and into those that were postponed."""
        with self._lock:
            installer = self._load_installer()
            needed = self._find_implementation_modules(installer, module.__name__) if installer else []
        # Without the lock: whoever imports one of them in another thread may have to come here before it is imported.
        errors = _import_all(needed)
        with self._lock:
            installer = self._load_installer()
            if installer:
                self._install_or_postpone(installer, module, module.__name__, errors)
                for name in list(self._postponed):
                    self._install_or_postpone(installer, self._postponed.pop(name), module.__name__, errors)

    def _find_implementation_modules(self, installer: Installer, module: str) -> list[str]:
        """The modules of the overrides that `module` needs, and of those that failed while others waited for them."""
        waiting = [name for other in self._postponed for name in installer.implementation_modules(other)]
        return installer.implementation_modules(module) + [name for name in waiting if name not in sys.modules]

    def _install_or_postpone(
        self, installer: Installer, module: ModuleType, imported: str, errors: dict[str, Exception]
    ) -> None:
        """Install into `module` now or, if an override that it needs is not imported, after a later import.

        The failed import of an override is final only once no other import is in progress: it may have failed because
        of another thread, or of a module that is half imported.

        Args:
            imported: the module whose import brought this about; it counts as imported.
            errors: why the import of an override failed.
        """
        needed = installer.implementation_modules(module.__name__)
        missing = set(needed) - {imported, *fully_imported(needed)}
        if missing and (being_imported(self._hooked) - {imported} or not missing <= set(errors)):
            self._postponed[module.__name__] = module
        else:
            installer.install_into(module, errors)


def _import_all(modules: Iterable[str]) -> dict[str, Exception]:
    """Import `modules`; return why some could not be imported."""
    errors: dict[str, Exception] = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            errors[name] = error
    return errors
