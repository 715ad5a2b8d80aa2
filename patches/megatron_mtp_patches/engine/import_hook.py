"""Call a function as soon as a module has been imported.

wrapt has such hooks, but importing wrapt 2 costs several times what importing this whole package may cost in every
process of a training image (it loads asyncio); and a hook of wrapt's is gone after its first call, so a module whose
patching failed would slip through unpatched at the second import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


def on_import(names: Iterable[str], callback: Callback) -> None:
    """Call `callback(module)` after each later import of one of the modules `names`.

    What the callback raises, the import raises, and the module is not imported.
    """
    sys.meta_path.insert(0, _Finder(frozenset(names), callback))


def when_imported(names: Iterable[str], callback: Callback) -> None:
    """As `on_import`, and call it at once for those of the modules that are imported already."""
    names = frozenset(names)
    on_import(names, callback)
    for name in fully_imported(names):
        callback(sys.modules[name])


def being_imported(names: Iterable[str]) -> set[str]:
    """The modules among `names` whose import has begun, in this thread or another, and has not ended."""
    present = {name for name in names if sys.modules.get(name)}
    return present - set(fully_imported(present))


def fully_imported(names: Iterable[str]) -> list[str]:
    """The modules among `names` whose import has ended."""
    present = sorted({name for name in names if sys.modules.get(name)})
    specs = {name: getattr(sys.modules[name], "__spec__", None) for name in present}
    return [name for name, spec in specs.items() if not getattr(spec, "_initializing", False)]


class _Finder:
    """Asks the finders after it for the modules `names`, so it must come before them."""

    def __init__(self, names: frozenset[str], callback: Callback) -> None:
        self.names = names
        self.callback = callback

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self.names:
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :]:  # one before it may be asking it
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)  # type: ignore[arg-type]
                if spec is not None:
                    _call_after_exec(spec.loader, self.callback)
                    return spec
        return None


def _call_after_exec(loader: Any, callback: Callback) -> None:
    # A loader is made for one import, so its method can be shadowed for that import alone.
    exec_module = loader.exec_module

    def exec_and_call(module: ModuleType) -> None:
        vars(loader).pop("exec_module", None)  # gone already where another hook shadowed it too
        exec_module(module)
        callback(module)

    loader.exec_module = exec_and_call
