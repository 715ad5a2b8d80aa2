"""A folder of small modules on sys.path, and engines that patch them. The engine knows no Megatron; nor do these."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from megatron_mtp_patches.engine import Edit, Patch, Probe, Project, PullRequest
from megatron_mtp_patches.engine.engine import Engine
from megatron_mtp_patches.engine.new_release import make_known_sources, write_known_sources

PROJECT = Project(package="lib_patches", library="Lib", library_package="lib", repository="example/lib")

# The library to patch, of two modules, and the overrides.
LIB = '''
import argparse
from dataclasses import dataclass


def f(x):
    """Docstring."""
    return f"original {x}"


def make_parser(parser):
    parser.add_argument("--seed", type=int, default=1)
    return parser


class C:
    def method(self, by=1):
        return f"method {by}"

    @staticmethod
    def static():
        return "static"

    @classmethod
    def class_method(cls):
        return cls


@dataclass
class Config:
    width: int = 1

    def __post_init__(self):
        self.seen = getattr(self, "depth", "nothing")
'''
LIB2 = """
def g():
    return "g"
"""
OVERRIDES = """
def f(x):
    return f"override {x}"


def method(self, by=1):
    return f"override method {by}"


def new_method(self):
    return "new"


def add_suffix(call):
    return f"{call.proceed()} suffix"


def add_type_name(call):
    return f"{type(call.instance).__name__} {call.proceed()}"


def add_mark(call):
    return f"{call.proceed()}!"
"""


class Library:
    """Writes modules into the folder and makes engines that know what lies there as release 1.0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("lib.py", LIB)
        self.write("lib2.py", LIB2)
        self.write("overrides.py", OVERRIDES)

    def write(self, file: str, source: str) -> Path:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        importlib.invalidate_caches()
        return path

    def edit(self, file: str, old: str, new: str) -> Path:
        """Change a source file that is not imported yet."""
        source = (self.folder / file).read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {file}"
        return self.write(file, source.replace(old, new))

    def load(self, module: str = "lib") -> ModuleType:
        return importlib.import_module(module)

    def engine(self, *catalog: Patch, base: tuple[Patch, ...] = ()) -> Engine:
        """An engine that knows the sources as they are now."""
        file = self.folder.parent / "fingerprints.json"
        write_known_sources(make_known_sources((*catalog, *base), {"1.0": [str(self.folder)]}), file)
        return Engine(PROJECT, catalog, str(file), base=base)

    def snapshot(self) -> list[dict[str, object]]:
        """What the library and its classes hold."""
        module, other = self.load(), self.load("lib2")
        owners = (module, module.C, module.Config, other)
        return [*(dict(vars(owner)) for owner in owners), dict(module.Config.__dataclass_fields__)]

    def applied(self, *edits: Edit) -> Engine:
        """An engine that has applied one patch made of `edits`."""
        engine = self.engine(self.patch(*edits))
        engine.apply("all", "raise")
        return engine

    @staticmethod
    def patch(
        *edits: Edit,
        id: str = "a-patch",
        probe: Probe | None = None,
        repairs: tuple[str, ...] = (),
        native_since: str | None = "2.0",
        is_repair: bool = False,
    ) -> Patch:
        upstream = (PullRequest(1, native_since=native_since),)
        texts = {"id": id, "summary": "Do something", "upstream": upstream, "repairs": repairs}
        return Patch(**texts, probe=probe, edits=edits, is_repair=is_repair)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # sources change faster than the clock of the cache
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    folder = tmp_path / "lib"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    yield Library(folder)
    for name in set(sys.modules) - known:
        names = getattr(sys.modules[name], "__dict__", {})
        if any(str(place).startswith(str(tmp_path)) for place in (names.get("__file__"), *names.get("__path__", ()))):
            del sys.modules[name]


@pytest.fixture(params=["imported before the patches", "imported after the patches"])
def imported_first(request: pytest.FixtureRequest) -> bool:
    return request.param == "imported before the patches"
