"""A library whose files change while a process runs, or whose compiled code is not that of its files."""

from __future__ import annotations

import importlib
import py_compile
import sys

import pytest
from megatron_mtp_patches.engine import AddField, Override, PatchError, Wrap

REPLACE_F = Override("lib:f", "overrides:f")
METHOD = Wrap("lib:C.method", "overrides:add_mark")
DEPTH = AddField("lib:Config", field="depth", type=int, default=7, doc="")
F_LINE = 'return f"original {x}"'
CHANGED_LINE = 'return f"changed {x}"'


@pytest.mark.parametrize("policy", ["raise", "warn", "skip"])
def test_a_reload_of_a_changed_source_refuses_whole_patches_and_keeps_the_others(library, policy, recwarn):
    changed = library.patch(Override("lib2:g", "overrides:new_method"), REPLACE_F, id="changed")
    engine = library.engine(changed, library.patch(METHOD, DEPTH, id="other"))
    engine.apply("all", policy)
    module, lib2 = library.load(), library.load("lib2")
    assert (module.f(1), lib2.g(1)) == ("override 1", "new")
    library.edit("lib.py", F_LINE, CHANGED_LINE)
    if policy == "raise":
        with pytest.raises(PatchError, match="changed is refused: lib:f is not the source of any release"):
            importlib.reload(module)
    else:
        importlib.reload(module)
    assert sum("changed is refused" in str(warning.message) for warning in recwarn) == (policy == "warn")
    assert (module.f(1), lib2.g()) == ("changed 1", "g")
    assert (module.C().method(), module.Config().depth) == ("method 1!", 7)
    assert [engine.report(patch).state for patch in engine.catalog] == ["refused", "applied"]
    library.edit("lib.py", CHANGED_LINE, F_LINE)
    engine.apply("none", policy)
    assert (module.C().method(), hasattr(module.Config, "depth")) == ("method 1", False)
    importlib.reload(module)
    engine.apply("all", policy)
    assert (module.f(1), lib2.g(1), module.C().method()) == ("override 1", "new", "method 1!")


@pytest.mark.parametrize("edit", [REPLACE_F, METHOD])
def test_a_file_that_changed_after_its_import_is_refused(library, edit):
    """What runs is not known, though the file is the source of a known release."""
    engine = library.engine(library.patch(edit))
    source = (library.folder / "lib.py").read_text(encoding="utf-8")
    library.write("lib.py", "# an older release\n\n\n" + source.replace(F_LINE, CHANGED_LINE))
    module = library.load()
    library.write("lib.py", source)
    with pytest.raises(PatchError, match=rf"{edit.target} does not run what is in .*lib\.py now"):
        engine.apply("all", "raise")
    assert (module.f(1), module.C().method()) == ("changed 1", "method 1")


def test_compiled_code_of_an_older_file_is_refused(library):
    engine = library.engine(library.patch(REPLACE_F))
    source = (library.folder / "lib.py").read_text(encoding="utf-8")
    file = library.write("lib.py", "# an older release\n\n\n" + source.replace(F_LINE, CHANGED_LINE))
    # as build systems do, which keep no times
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    library.write("lib.py", source)
    engine.apply("all", "raise")
    with pytest.raises(PatchError, match=r"a-patch is refused: lib:f does not run .*delete the __pycache__"):
        library.load()
    assert "lib" not in sys.modules


def test_another_library_is_found_below_an_unchecked_edit(library):
    library.write("other_library.py", "def method(self, by=1):\n    return 'other_library'\n")
    cls = library.load().C
    cls.method = library.load("other_library").method
    unchecked = library.patch(Wrap("lib:C.method", "overrides:add_mark", check_source=False), id="unchecked")
    engine = library.engine(unchecked, library.patch(Override("lib:C.method", "overrides:method"), id="checked"))
    with pytest.raises(PatchError, match="checked is refused: lib:C.method was already changed by other_library"):
        engine.apply("all", "raise")
    engine.apply("all", "skip")
    assert cls().method() == "other_library!"
