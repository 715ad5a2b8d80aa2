"""A folder of small modules on sys.path, and engines that patch them. The engine knows no Megatron; nor do these."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from megatron_mtp_patches.engine import Edit, Patch, Probe
from megatron_mtp_patches.engine.engine import Engine
from megatron_mtp_patches.engine.fingerprints import make_table

# The library to patch, and the overrides.
GARDEN = '''
import argparse
from dataclasses import dataclass


def water(litres):
    """Pour."""
    return f"poured {litres}"


def make_parser(parser):
    parser.add_argument("--seed", type=int, default=1)
    return parser


class Tree:
    def grow(self, by=1):
        return f"grew {by}"

    @staticmethod
    def species():
        return "oak"

    @classmethod
    def plant(cls):
        return cls


@dataclass
class Bed:
    width: int = 1

    def __post_init__(self):
        self.seen = getattr(self, "depth", "nothing")
'''
OURS = """
def water(litres):
    return f"our {litres}"


def grow(self, by=1):
    return f"our tree grew {by}"


def bloom(self):
    return "bloomed"


def twice(wrapped, instance, args, kwargs):
    return f"{wrapped(*args, **kwargs)} twice"


def named(wrapped, instance, args, kwargs):
    return f"{type(instance).__name__} {wrapped(*args, **kwargs)}"


def loudly(wrapped, instance, args, kwargs):
    return f"{wrapped(*args, **kwargs)}!"
"""


class Garden:
    """Writes modules into the folder and makes engines that know what lies there as release 1.0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("garden.py", GARDEN)
        self.write("ours.py", OURS)

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

    def load(self, module: str = "garden") -> ModuleType:
        return importlib.import_module(module)

    def engine(self, *catalog: Patch, base: tuple[Patch, ...] = ()) -> Engine:
        """An engine that knows the sources as they are now."""
        file = self.folder.parent / "fingerprints.json"
        file.write_text(json.dumps(make_table((*catalog, *base), {"1.0": [str(self.folder)]})), encoding="utf-8")
        return Engine(catalog, str(file), base=base)

    def applied(self, *edits: Edit) -> Engine:
        """An engine that has applied one patch made of `edits`."""
        engine = self.engine(self.patch(*edits))
        engine.apply("all", "raise")
        return engine

    @staticmethod
    def patch(*edits: Edit, id: str = "a-patch", probe: Probe | None = None, repairs: bool = False) -> Patch:
        return Patch(id=id, doc="Do something.\n\nAnd more.", upstream=(), probe=probe, edits=edits, repairs=repairs)


@pytest.fixture
def garden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Garden]:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # sources change faster than the clock of the cache
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    folder = tmp_path / "lib"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    known = set(sys.modules)
    yield Garden(folder)
    for name in set(sys.modules) - known:
        names = getattr(sys.modules[name], "__dict__", {})
        if any(str(place).startswith(str(tmp_path)) for place in (names.get("__file__"), *names.get("__path__", ()))):
            del sys.modules[name]


@pytest.fixture(params=["imported before the patches", "imported after the patches"])
def garden_first(request: pytest.FixtureRequest) -> bool:
    return request.param == "imported before the patches"
