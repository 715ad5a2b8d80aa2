"""Collect test files that import something absent at their top, because their tests may not need it.

Something absent is a GPU-only package or, in a file of another release, a module or name that this Megatron lacks. A
test that uses it is skipped with its name. Imports in Megatron are left alone: to Megatron, a package stays absent.
"""

from __future__ import annotations

import builtins
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PACKAGES = {"transformer_engine", "transformer_engine_torch", "flash_attn", "apex", "triton", "mamba_ssm"}
VERSION_CHECKS = {"is_fa_min_version": "flash_attn", "is_te_min_version": "transformer_engine"}  # may raise without


class Absent:
    """Stands for a package that is not installed, for anything in it, or for a name that a module lacks.

    Asked for at a file's top whether it is there ("fp8, and if not, why?"; "at least this version?"), it says no.
    """

    __path__: list[str] = []
    __all__: list[str] = []

    def __init__(self, what: str, name: str) -> None:
        self.what = what
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(self.what, name)

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.name.startswith("check_"):
            return False, f"needs {self.what}"
        if self.name in VERSION_CHECKS:
            return False
        pytest.skip(f"needs {self.what}", allow_module_level=True)


class Partial:
    """A module, with stand-ins for the names that it lacks."""

    def __init__(self, module: Any, lacking: set[str]) -> None:
        self.module = module
        self.lacking = lacking

    def __getattr__(self, name: str) -> Any:
        if name in self.lacking:
            return Absent(f"{self.module.__name__}.{name}", name)
        return getattr(self.module, name)


def install(tests: Path) -> None:
    """Let imports in files below `tests` succeed for PACKAGES and for names that a module lacks."""
    original = builtins.__import__
    unanswered = {name for name, package in VERSION_CHECKS.items() if not find_spec(package)}

    def import_or_stand_in(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if tests not in Path((globals or {}).get("__file__") or "/").parents:
            return original(name, globals, locals, fromlist, level)
        try:
            module = original(name, globals, locals, fromlist, level)
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            if package not in PACKAGES and package != "megatron":
                raise
            return Absent(error.name if package == "megatron" else package, name.rpartition(".")[2])
        lacking = {one for one in fromlist or () if one != "*" and not hasattr(module, one)}
        lacking |= unanswered.intersection(fromlist or ())
        return Partial(module, lacking) if lacking else module

    builtins.__import__ = import_or_stand_in
