"""Being called when a module has been imported."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from megatron_mtp_patches.engine.watch import watch


@pytest.fixture
def arrivals(garden):
    """The names of the modules that arrived."""
    return []


def test_watched_modules_are_announced_once_executed_and_others_are_not(garden, arrivals):
    watch(["garden"], lambda module: arrivals.append((module.__name__, module.water(1))))
    garden.load("ours")
    assert arrivals == []
    garden.load()
    garden.load()
    assert arrivals == [("garden", "poured 1")]


def test_modules_that_are_there_already_are_announced_at_once(garden, arrivals):
    garden.load()
    watch(["garden", "absent"], lambda module: arrivals.append(module.__name__))
    assert arrivals == ["garden"]


def test_submodules_are_announced_before_the_package_that_imports_them(garden, arrivals):
    garden.write("field/__init__.py", "from . import corn\nripe = corn.ripe")
    garden.write("field/corn.py", "ripe = False")

    def ripen(module):
        arrivals.append(module.__name__)
        module.ripe = True

    watch(["field.corn"], ripen)
    assert garden.load("field").ripe is True
    assert arrivals == ["field.corn"]


def test_what_the_callback_raises_the_import_raises_each_time(garden):
    def fail(module):
        raise LookupError(module.__name__)

    watch(["garden"], fail)
    for _ in range(2):
        with pytest.raises(LookupError, match="garden"):
            garden.load()
        assert "garden" not in sys.modules


def test_two_watchers_are_both_called(garden, arrivals):
    watch(["garden"], lambda module: arrivals.append("first"))
    watch(["garden"], lambda module: arrivals.append("second"))
    garden.load()
    assert sorted(arrivals) == ["first", "second"]


def test_a_module_that_does_not_exist_is_still_not_found(garden):
    watch(["absent"], print)
    with pytest.raises(ModuleNotFoundError, match="absent"):
        garden.load("absent")


def test_modules_keep_their_spec_and_loader(garden):
    watch(["garden"], lambda module: None)
    spec = garden.load().__spec__
    assert spec.origin == str(garden.folder / "garden.py")
    assert "exec_module" not in vars(spec.loader)
    assert importlib.util.find_spec("garden") is spec
