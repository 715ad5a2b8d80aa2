"""Base patches that a command adds to an engine: when they are in force, around what, and what a failure leaves."""

from __future__ import annotations

import sys

import pytest
from megatron_mtp_patches.engine import AddField, Override, PatchError, Wrap

MARK = Wrap("lib:f", "overrides:add_mark")
SUFFIX = Wrap("lib:f", "overrides:add_suffix", check_source=False)
METHOD = Wrap("lib:C.method", "overrides:add_mark", check_source=False)
DEPTH = AddField("lib:Config", field="depth", type=int, default=7, doc="")
G = Wrap("lib2:g", "overrides:add_mark", check_source=False)
NO_OVERRIDE = Wrap("lib:C.static", "overrides:nowhere", check_source=False)


def added(library, *edits):
    return library.patch(*edits, id="added")


@pytest.mark.parametrize("added_first", [True, False], ids=["before the first apply", "while active"])
def test_an_added_patch_wraps_around_all_others_whenever_it_is_added(library, imported_first, added_first):
    engine = library.engine(
        library.patch(MARK), base=(library.patch(Wrap("lib:f", "overrides:add_type_name"), id="base"),)
    )
    if imported_first:
        library.load()
    if added_first:
        engine.add_base(added(library, SUFFIX))
    engine.apply("all", "raise")
    engine.add_base(added(library, SUFFIX))
    assert library.load().f(1) == "NoneType original 1! suffix"
    engine.apply("all", "raise")
    assert library.load().f(1) == "NoneType original 1! suffix"


def test_apply_add_revert_apply_is_the_identity(library, imported_first):
    library.write("user.py", "from lib import f\n")
    engine = library.engine(library.patch(MARK, DEPTH))
    if imported_first:
        originals = library.snapshot()
    engine.apply("all", "raise")
    engine.add_base(added(library, SUFFIX, METHOD, DEPTH))
    module, user = library.load(), library.load("user")
    report = engine.report(engine.catalog[0])
    for _ in range(2):
        assert (module.f(1), user.f(1), module.C().method()) == ("original 1! suffix",) * 2 + ("method 1!",)
        assert module.Config().depth == 7
        assert engine.report(engine.catalog[0]) == report
        engine.revert()
        if imported_first:
            assert library.snapshot() == originals
        assert (module.f(1), user.f(1), module.C().method()) == ("original 1", "original 1", "method 1")
        assert not hasattr(module.Config, "depth")
        engine.apply("all", "raise")


def test_an_added_patch_applies_whatever_is_selected(library, imported_first):
    engine = library.engine(library.patch(MARK))
    if imported_first:
        library.load()
    engine.apply("none", "raise")
    engine.add_base(added(library, SUFFIX))
    assert library.load().f(1) == "original 1 suffix"
    with pytest.raises(PatchError, match="unknown patch '-added'"):
        engine.apply("-added", "raise")


def test_a_patch_added_after_a_revert_waits_for_the_next_apply(library, imported_first):
    engine = library.applied(MARK)
    if imported_first:
        library.load(), library.load("lib2")
    engine.revert()
    assert engine.report(engine.catalog[0]).state == "disabled"
    engine.add_base(added(library, SUFFIX, G))
    assert (library.load().f(1), library.load("lib2").g()) == ("original 1", "g")
    engine.apply("none", "raise")
    assert (library.load().f(1), library.load("lib2").g()) == ("original 1 suffix", "g!")


def test_adding_a_patch_twice_changes_nothing(library, imported_first):
    engine = library.applied(METHOD)
    if imported_first:
        library.load()
    engine.add_base(added(library, SUFFIX))
    finders = list(sys.meta_path)
    engine.add_base(added(library, SUFFIX))
    assert library.load().f(1) == "original 1 suffix"
    engine.apply("all", "raise")
    assert sys.meta_path == finders, "nothing new is watched"
    assert len(engine.added) == 1
    engine.revert()
    assert library.load().f(1) == "original 1"


def test_adding_a_patch_of_the_base_changes_nothing(library):
    engine = library.engine(library.patch(MARK), base=(added(library, SUFFIX),))
    engine.add_base(added(library, SUFFIX))
    engine.apply("all", "raise")
    assert library.load().f(1) == "original 1 suffix!"


def test_the_import_hook_covers_the_module_of_an_added_wrapper(library):
    """The wrapper's module imports the target, which therefore waits for the wrapper."""
    library.write("overrides_lib2.py", "import lib2\n\ndef oil(call):\n    return 'oiled ' + call.proceed()\n")
    engine = library.applied(MARK)
    engine.add_base(added(library, Wrap("lib2:g", "overrides_lib2:oil", check_source=False)))
    library.load("overrides_lib2")
    assert library.load("lib2").g() == "oiled g"


def test_a_module_imported_past_the_hook_is_patched_later(library):
    engine = library.applied(G)
    finders = list(sys.meta_path)
    engine.add_base(added(library, SUFFIX))
    sys.meta_path[:] = finders
    assert library.load().f(1) == "original 1"
    engine.install_missed_modules()
    assert library.load().f(1) == "original 1 suffix"


def test_a_missing_target_of_an_added_patch_is_a_warning(library):
    library.load()
    engine = library.applied(METHOD)
    with pytest.warns(UserWarning, match="lib_patches: this Lib has no lib:absent, on which it relies"):
        engine.add_base(added(library, Wrap("lib:absent", "overrides:add_mark", check_source=False), SUFFIX))
    assert library.load().f(1) == "original 1 suffix"


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_drift", ["raise", "warn", "skip"])
def test_an_added_patch_that_fails_raises_and_leaves_the_engine_as_it_was(library, on_drift):
    engine = library.engine(library.patch(MARK))
    engine.apply("all", on_drift)
    module, lib2 = library.load(), library.load("lib2")
    before = library.snapshot()
    patch = added(
        library, SUFFIX, METHOD, DEPTH, Override("lib:new_function", "overrides:f", where="missing"), NO_OVERRIDE, G
    )
    with pytest.raises(PatchError, match=r"added is refused: .*nowhere"):
        engine.add_base(patch)
    assert library.snapshot() == before and lib2.g() == "g"
    assert engine.is_active and module.f(1) == "original 1!"
    library.load("overrides").nowhere = library.load("overrides").add_mark
    engine.add_base(patch)
    assert (module.f(1), module.C.static(), lib2.g()) == ("original 1! suffix", "static!", "g!")


@pytest.mark.parametrize("on_drift", ["raise", "skip"])
def test_an_added_patch_that_fails_later_fails_the_import(library, on_drift):
    engine = library.engine(library.patch(MARK))
    engine.apply("all", on_drift)
    engine.add_base(added(library, SUFFIX, NO_OVERRIDE))
    for _ in range(2):
        with pytest.raises(PatchError, match=r"added is refused: .*nowhere"):
            library.load()
        assert "lib" not in sys.modules


def test_nothing_is_added_where_another_patch_of_the_module_is_refused(library):
    engine = library.applied(MARK, Override("lib2:g", "overrides:nowhere"))
    module = library.load()
    with pytest.raises(PatchError, match="a-patch is refused"):
        library.load("lib2")
    with pytest.raises(PatchError, match="a-patch is refused"):
        engine.add_base(added(library, SUFFIX))
    assert module.f(1) == "original 1"
