"""Applies a catalog of patches as Megatron's modules arrive, and takes them out again.

This much is loaded in every process that imports the package; the installer, only once there is a module to patch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from functools import cached_property
from types import ModuleType

from .declare import Patch
from .selection import check_policy, select
from .watch import imported, watch

TYPE_CHECKING = False  # importing typing for the constant would cost a third of what this package may cost
if TYPE_CHECKING:
    from .installer import Installer


class Engine:
    """The patches of `catalog`, of which the user selects some, and those of `base`, which always apply."""

    def __init__(self, catalog: Iterable[Patch], table_file: str, base: Iterable[Patch] = ()) -> None:
        self.catalog = tuple(catalog)
        self.base = tuple(base)
        self.table_file = table_file
        self.selected = frozenset(patch.id for patch in self.catalog)
        self.on_drift = "raise"
        self.active = False
        self._watching = False
        self._lock = threading.RLock()

    @property
    def modules(self) -> dict[str, None]:
        return dict.fromkeys(module for patch in (*self.base, *self.catalog) for module in patch.modules)

    @cached_property
    def installer(self) -> Installer:
        """Made anew whenever the set is applied or reverted; while it is not applied, every patch is left out."""
        from .installer import Installer

        selected = self.selected if self.active else frozenset()
        return Installer(self.catalog, self.base, selected, self.on_drift, self.table_file)

    def apply(self, choice: str, on_drift: str) -> None:
        """Patch what is imported already, and each further module as it arrives. See `selection` for the words."""
        with self._lock:
            selected = select(choice, [patch.id for patch in self.catalog])
            self.on_drift = check_policy(on_drift)
            self.revert()
            self.selected = selected
            self.active = True
        try:
            if not self._watching:
                self._watching = True
                watch(self.modules, self._arrived)
            else:
                for name in imported(self.modules):
                    self._arrived(sys.modules[name])
        except BaseException:
            self.revert()
            raise

    def catch_up(self) -> None:
        """Patch what was imported past the hook: by a finder that somebody put before ours, or while we came."""
        with self._lock:
            if self.active:
                for name in filter(self.installer.has_missed, imported(self.modules)):
                    self._arrived(sys.modules[name])

    def revert(self) -> None:
        """Put every original back, copies made by `from x import y` included, and patch nothing further.

        Raises:
            PatchError: somebody has changed the same after these patches; then nothing is put back.
        """
        with self._lock:
            if "installer" in vars(self):
                self.installer.remove_all()
                del self.installer
            self.active = False

    def _arrived(self, module: ModuleType) -> None:
        with self._lock:
            if self.active:
                self.installer.install_into(module)
