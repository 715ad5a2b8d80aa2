"""Call somebody as soon as a module has been imported.

wrapt has such hooks, but importing wrapt 2 costs several times what importing this whole package may cost in every
process of a training image (it loads asyncio); and a hook of wrapt's is gone after its first call, so a module whose
patching failed would slip through unpatched at the second import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType

TYPE_CHECKING = False  # as in engine.py: typing itself is not imported
if TYPE_CHECKING:
    from typing import Any

Callback = Callable[[ModuleType], None]


def watch(names: Iterable[str], callback: Callback) -> None:
    """Call `callback(module)` now for those of `names` that are imported, and after each later import of one.

    What the callback raises, the import raises, and the module is not imported.
    """
    names = frozenset(names)
    watch_imports(names, callback)
    for name in imported(names):
        callback(sys.modules[name])


def watch_imports(names: Iterable[str], callback: Callback) -> None:
    """As `watch`, but leave alone what is imported already."""
    sys.meta_path.insert(0, _Finder(frozenset(names), callback))


def unfinished(names: Iterable[str]) -> set[str]:
    """Those of `names` that are being imported, by this thread or another."""
    present = {name for name in names if name in sys.modules}
    return present - set(imported(present))


def imported(names: Iterable[str]) -> list[str]:
    """Those of `names` whose import has ended."""
    present = sorted({name for name in names if name in sys.modules})
    specs = {name: getattr(sys.modules[name], "__spec__", None) for name in present}
    return [name for name, spec in specs.items() if not getattr(spec, "_initializing", False)]


class _Finder:
    """Asks the finders after it for the watched modules, so it must come before them."""

    def __init__(self, names: frozenset[str], callback: Callback) -> None:
        self.names = names
        self._callback = callback

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :]:  # one before it may be asking it
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)  # type: ignore[arg-type]
                if spec is not None:
                    _announce_after_exec(spec.loader, self._callback)
                    return spec
        return None


def _announce_after_exec(loader: Any, callback: Callback) -> None:
    # A loader is made for one import, so its method can be shadowed for that import alone.
    exec_module = loader.exec_module

    def exec_and_announce(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # gone already where another watcher shadowed it too
        exec_module(module)
        callback(module)

    loader.exec_module = exec_and_announce
