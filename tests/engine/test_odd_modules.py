"""Modules that are odd, that another finder imports, or that are not imported to the end."""

from __future__ import annotations

import sys
import types

import pytest
from megatron_mtp_patches.engine import Override, Wrap

REPLACE_F = Override("lib:f", "overrides:f")
METHOD = Override("lib:C.method", "overrides:method")
MARK = Wrap("lib:f", "overrides:add_mark")


def test_modules_with_odd_contents_do_not_break_rebinding(library, monkeypatch):
    class Touchy(types.ModuleType):
        def __getattr__(self, name):
            raise RuntimeError("lazy")

    class Uncomparable:
        def __eq__(self, other):
            raise RuntimeError("do not compare")

    touchy = Touchy("touchy")
    touchy.thing = Uncomparable()
    monkeypatch.setitem(sys.modules, "touchy", touchy)
    monkeypatch.setitem(sys.modules, "nothing", None)
    library.load()
    library.applied(REPLACE_F, Override("lib:new_function", "overrides:f", where="missing"))
    assert library.load().f(1) == "override 1"


def test_a_module_that_is_still_being_imported_is_patched_later(library):
    library.write("lib2.py", "import early\n\ndef g():\n    return 'original'\n")
    library.write("early.py", "from registry import engine\nengine.apply('all', 'raise')\n")
    library.write("overrides2.py", "def g():\n    return 'override'\n")
    engine = library.engine(library.patch(Override("lib2:g", "overrides2:g")))
    registry = types.ModuleType("registry")
    registry.engine = engine
    sys.modules["registry"] = registry
    try:
        lib2 = library.load("lib2")
    finally:
        del sys.modules["registry"]
    assert lib2.g() == "original"
    engine.install_missed_modules()
    assert lib2.g() == "override"


def test_a_module_whose_import_is_forbidden_is_left_alone(library, monkeypatch):
    """A test that hides a package puts None in the place of its modules."""
    monkeypatch.setitem(sys.modules, "lib", None)
    engine = library.applied(REPLACE_F)
    engine.install_missed_modules()
    monkeypatch.delitem(sys.modules, "lib")
    assert library.load().f(1) == "override 1"


@pytest.mark.parametrize("stand_in", ["None", "type('Mock', (), {})()"])
def test_methods_of_a_class_that_is_none_here_are_left_alone(library, stand_in):
    """Megatron has None or a mock for a class that needs a library which is not installed."""
    source = f"""
        if False:
            class Needy:
                def method(self):
                    return 1
        else:
            Needy = {stand_in}

        def f():
            return "f"
        """
    library.write("lib.py", source)
    engine = library.applied(
        Wrap("lib:Needy.method", "overrides:add_mark", check_source=False),
        Wrap("lib:f", "overrides:add_mark", check_source=False),
    )
    assert library.load().f() == "f!"
    assert engine.report(engine.catalog[0]).state == "applied"
    assert engine.report(engine.catalog[0]).targets["lib:Needy.method"] == "absent here"
    engine.revert()
    assert library.load().f() == "f"
