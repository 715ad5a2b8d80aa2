"""Applies a catalog of patches as Megatron's modules arrive, and takes them out again.

This much is loaded in every process that imports the package; the installer, only once there is a module to patch.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from types import ModuleType

from .declare import Edit, Patch
from .selection import check_policy, select
from .watch import imported, unfinished, watch_imports

TYPE_CHECKING = False  # importing typing for the constant would cost a third of what this package may cost
if TYPE_CHECKING:
    from .installer import Installer


class Engine:
    """The patches of `catalog`, of which the user selects some, and those of `base`, which always apply.

    A command may add base patches later: those wrap around all others, whenever Megatron is imported.
    """

    def __init__(self, catalog: Iterable[Patch], table_file: str, base: Iterable[Patch] = ()) -> None:
        self.catalog = tuple(catalog)
        self.base = tuple(base)
        self.added: tuple[Patch, ...] = ()
        self.table_file = table_file
        self.selected = frozenset(patch.id for patch in self.catalog)
        self.on_drift = "raise"
        self.active = False
        self._watched: frozenset[str] = frozenset()
        self._postponed: dict[str, ModuleType] = {}  # modules whose overrides were being imported when they arrived
        self._lock = threading.RLock()
        self._here = threading.local()

    @property
    def modules(self) -> dict[str, None]:
        return dict.fromkeys(edit.module for edit in self._edits)

    @property
    def _edits(self) -> list[Edit]:
        return [edit for patch in (*self.base, *self.catalog, *self.added) for edit in patch.edits]

    @cached_property
    def installer(self) -> Installer:
        """Made anew whenever the set is applied or reverted; while it is not applied, every patch is left out."""
        from .installer import Installer

        selected = self.selected if self.active else frozenset()
        return Installer(self.catalog, self.base, selected, self.on_drift, self.table_file, self.added)

    def apply(self, choice: str, on_drift: str) -> None:
        """Patch what is imported already, and each further module as it arrives. See `selection` for the words."""
        with self._lock:
            selected = select(choice, [patch.id for patch in self.catalog])
            self.on_drift = check_policy(on_drift)
            self.revert()
            self.selected = selected
            self.active = True
        try:
            self._install_or_await(self.modules)
        except BaseException:
            self.revert()
            raise

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
                if "installer" in vars(self):
                    self.installer.withdraw(patch)
                self._set_added(tuple(other for other in self.added if other != patch))
            raise

    def _set_added(self, patches: tuple[Patch, ...]) -> None:
        self.added = patches
        if "installer" in vars(self):
            self.installer.set_added(patches)

    def _install_or_await(self, modules: Iterable[str]) -> None:
        """Patch those of `modules` that are imported, and from now on each that arrives while the engine is active."""
        with self._lock:
            names = frozenset({*self.modules, *(edit.home for edit in self._edits)})
            new, self._watched = names - self._watched, names | self._watched
        if new:
            watch_imports(new, self._arrived)
        with self._copies_follow():
            for name in imported(modules):
                self._patch(sys.modules[name])

    def catch_up(self) -> None:
        """Patch what was imported past the hook: by a finder that somebody put before ours, or while we came."""
        for name in imported(self.modules):
            with self._lock:
                missed = self.active and self.installer.has_missed(name)
            if missed:
                self._arrived(sys.modules[name])

    def revert(self) -> None:
        """Put every original back, copies made by `from x import y` included, and patch nothing further.

        Raises:
            PatchError: somebody has changed the same after these patches; then nothing is put back.
        """
        with self._lock:
            installer = vars(self).get("installer")
            if installer is not None:
                installer.remove_all()
                del self.installer
            self.active = False
            self._postponed.clear()
            if installer is not None:
                installer.copies.follow_all()

    def _arrived(self, module: ModuleType) -> None:
        with self._copies_follow():
            self._patch(module)

    @contextmanager
    def _copies_follow(self) -> Iterator[None]:
        """Afterwards the copies of what was replaced follow, once for all that this thread has imported within."""
        outermost = not getattr(self._here, "nested", False)
        self._here.nested = True
        try:
            yield
        finally:
            if outermost:
                self._here.nested = False
                with self._lock:
                    if self.active and "installer" in vars(self):
                        self.installer.settle_copies()

    def _patch(self, module: ModuleType) -> None:
        with self._lock:
            homes = self.installer.homes_for(module.__name__) if self.active else ()
        # Without the lock: whoever imports one of them in another thread may have to come here before it is imported.
        for home in homes:
            with suppress(Exception):  # raised anew, by the patch that cannot do without
                importlib.import_module(home)
        with self._lock:
            if self.active:
                self._install(module, module.__name__)
                for name in list(self._postponed):
                    self._install(self._postponed.pop(name), module.__name__)

    def _install(self, module: ModuleType, arrived: str) -> None:
        """Install into `module` now or, if that needs an override half imported, when that has `arrived`."""
        if unfinished(self.installer.homes_for(module.__name__)) - {arrived}:
            self._postponed[module.__name__] = module
        else:
            self.installer.install_into(module)
