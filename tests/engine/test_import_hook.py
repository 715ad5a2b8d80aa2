"""A callback runs when a module has been imported."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from megatron_mtp_patches.engine.import_hook import on_import, when_imported


@pytest.fixture
def calls():
    """What the callbacks were called with."""
    return []


def test_the_callback_gets_the_executed_module_once_and_no_other(library, calls):
    on_import(["lib"], lambda module: calls.append((module.__name__, module.f(1))))
    library.load("overrides")
    assert calls == []
    library.load()
    library.load()
    assert calls == [("lib", "original 1")]


def test_a_module_that_is_imported_already_is_not_announced(library, calls):
    library.load()
    on_import(["lib"], calls.append)
    library.load()
    assert calls == []


def test_a_module_that_is_imported_already_can_be_announced_at_once(library, calls):
    library.load()
    when_imported(["lib", "absent"], lambda module: calls.append(module.__name__))
    assert calls == ["lib"]


def test_a_submodule_is_announced_before_the_package_that_imports_it(library, calls):
    library.write("pkg/__init__.py", "from . import part\nready = part.ready")
    library.write("pkg/part.py", "ready = False")

    def make_ready(module):
        calls.append(module.__name__)
        module.ready = True

    on_import(["pkg.part"], make_ready)
    assert library.load("pkg").ready is True
    assert calls == ["pkg.part"]


def test_what_the_callback_raises_the_import_raises_each_time(library):
    def fail(module):
        raise LookupError(module.__name__)

    on_import(["lib"], fail)
    for _ in range(2):
        with pytest.raises(LookupError, match="lib"):
            library.load()
        assert "lib" not in sys.modules


def test_two_callbacks_for_one_module_are_both_called(library, calls):
    on_import(["lib"], lambda module: calls.append("first"))
    on_import(["lib"], lambda module: calls.append("second"))
    library.load()
    assert sorted(calls) == ["first", "second"]


def test_a_module_that_does_not_exist_is_still_not_found(library):
    on_import(["absent"], print)
    with pytest.raises(ModuleNotFoundError, match="absent"):
        library.load("absent")


def test_modules_keep_their_spec_and_loader(library):
    on_import(["lib"], lambda module: None)
    spec = library.load().__spec__
    assert spec.origin == str(library.folder / "lib.py")
    assert "exec_module" not in vars(spec.loader)
    assert importlib.util.find_spec("lib") is spec
