"""Applies a catalog of patches as Megatron's modules are imported, and takes them out again.

This much is loaded in every process that imports the package; the installer, only once there is a module to patch.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

from .declare import Edit, Patch
from .import_hook import being_imported, fully_imported, on_import
from .selection import check_policy, select

TYPE_CHECKING = False  # importing typing for the constant would cost a third of what this package may cost
if TYPE_CHECKING:
    from typing import Any

    from .installer import Installer
    from .report import Report


class Session:
    """What lasts from `apply()` to `revert()`: the user's choice, and what has been installed for it."""

    def __init__(self, selected: frozenset[str], on_drift: str) -> None:
        self.selected = selected
        self.on_drift = on_drift
        self.installer: Installer | None = None  # loaded by the engine when it is needed first
        self.postponed: dict[str, ModuleType] = {}  # modules that arrived before their overrides could be imported


class Engine:
    """The patches of `catalog`, of which the user selects some, and those of `base`, which always apply.

    A command may add base patches later: those wrap around all others, whenever Megatron is imported.
    """

    def __init__(self, catalog: Iterable[Patch], table_file: str, base: Iterable[Patch] = ()) -> None:
        self.catalog = tuple(catalog)
        self.base = tuple(base)
        self.added: tuple[Patch, ...] = ()
        self.table_file = table_file
        self._session: Session | None = None
        self._hooked: frozenset[str] = frozenset()
        self._lock = threading.RLock()
        self._thread = threading.local()

    @property
    def is_active(self) -> bool:
        """Whether patches are applied to each module that is imported."""
        return self._session is not None

    @property
    def modules(self) -> dict[str, None]:
        return dict.fromkeys(edit.module for edit in self._edits)

    @property
    def _edits(self) -> list[Edit]:
        return [edit for patch in (*self.base, *self.catalog, *self.added) for edit in patch.edits]

    # -- applying and reverting -----------------------------------------------------------------------------------

    def apply(self, choice: str, on_drift: str) -> None:
        """Patch what is imported already, and each further module as it arrives. See `selection` for the words."""
        with self._lock:
            session = Session(select(choice, [patch.id for patch in self.catalog]), check_policy(on_drift))
            self.revert()
            self._session = session
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
            installer = self._loaded_installer
            if installer is None:
                self._session = None
                return
            installer.edits.remove_all()
            self._session = None
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
                if self._loaded_installer:
                    self._loaded_installer.uninstall(patch)
                self._set_added(tuple(other for other in self.added if other != patch))
            raise

    def install_missed_modules(self) -> None:
        """Patch what was imported past the hook: by a finder that comes before ours, or while `apply()` ran."""
        for name in fully_imported(self.modules):
            with self._lock:
                missed = self._session is not None and self._load_installer(self._session).has_missing_edits(name)
            if missed:
                self._on_import(sys.modules[name])

    # -- reporting --------------------------------------------------------------------------------------------------

    def report(self, patch: Patch) -> Report:
        """Where `patch` stands."""
        from .report import report_on

        with self._lock:
            return report_on(patch, self._load_installer(self._session) if self._session else None)

    def record(self) -> str:
        """One line that identifies the patches, what became of each, and the sources that they met."""
        from .report import identify

        with self._lock:
            return identify(self.catalog, self._load_installer(self._session) if self._session else None)

    # -- modules ----------------------------------------------------------------------------------------------------

    @property
    def _loaded_installer(self) -> Installer | None:
        return self._session.installer if self._session else None

    def _load_installer(self, session: Session) -> Installer:
        if session.installer is None:
            from .installer import Installer

            session.installer = Installer(
                self.catalog, self.base, session.selected, session.on_drift, self.table_file, self.added
            )
        return session.installer

    def _set_added(self, patches: tuple[Patch, ...]) -> None:
        self.added = patches
        if self._loaded_installer:
            self._loaded_installer.set_added(patches)

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
        outermost = not getattr(self._thread, "nested", False)
        self._thread.nested = True
        try:
            yield
        finally:
            if outermost:
                self._thread.nested = False
                with self._lock:
                    if self._loaded_installer:
                        self._loaded_installer.rebind_copies()

    def _patch(self, module: ModuleType) -> None:
        """Install into `module`, and into those that were postponed."""
        with self._lock:
            needed = self._find_implementation_modules(self._session, module.__name__) if self._session else []
        # Without the lock: whoever imports one of them in another thread may have to come here before it is imported.
        errors = _import_all(needed)
        with self._lock:
            if self._session:
                self._install(self._session, module, module.__name__, errors)
                for name in list(self._session.postponed):
                    self._install(self._session, self._session.postponed.pop(name), module.__name__, errors)

    def _find_implementation_modules(self, session: Session, module: str) -> list[str]:
        """The modules of the overrides that `module` needs, and of those that failed while others waited for them."""
        installer = self._load_installer(session)
        waiting = [name for other in session.postponed for name in installer.implementation_modules(other)]
        return installer.implementation_modules(module) + [name for name in waiting if name not in sys.modules]

    def _install(self, session: Session, module: ModuleType, imported: str, errors: dict[str, Exception]) -> None:
        """Install into `module` now or, if an override that it needs is not imported, after a later import.

        An override that failed is final only when nothing else is being imported: another thread may have been in its
        way, or a module that is half imported.

        Args:
            imported: the module whose import brought this about; it counts as imported.
            errors: why the import of an override failed.
        """
        installer = self._load_installer(session)
        needed = installer.implementation_modules(module.__name__)
        missing = set(needed) - {imported, *fully_imported(needed)}
        if missing and (being_imported(self._hooked) - {imported} or not missing <= set(errors)):
            session.postponed[module.__name__] = module
        else:
            installer.install_into(module, errors)


def _import_all(modules: Iterable[str]) -> dict[str, Exception]:
    """Import `modules`; the answer says why one could not be imported."""
    errors: dict[str, Exception] = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            errors[name] = error
    return errors
