"""Who gets patched, when, and what happens where a patch cannot be installed or taken out."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
from megatron_mtp_patches.engine import AddField, Override, PatchError, Probe, Wrap

REPLACE_F = Override("lib:f", "overrides:f")
METHOD = Override("lib:C.method", "overrides:method")
MARK = Wrap("lib:f", "overrides:add_mark")
DEPTH = AddField("lib:Config", field="depth", type=int, default=7, doc="")
NO_OVERRIDE = Override("lib:C.static", "overrides:nowhere")  # the target is there, the override is not


def state(engine, number=0):
    return engine.report(engine.catalog[number]).state


def test_a_patch_is_pending_until_its_module_is_imported(library):
    engine = library.applied(REPLACE_F)
    report = engine.report(engine.catalog[0])
    assert (report.state, report.targets) == ("pending", {"lib:f": "pending"})
    assert report.reason == "this Lib lacks it; waits for the import of lib"
    assert "lib" not in sys.modules
    library.load()
    report = engine.report(engine.catalog[0])
    assert (report.state, report.targets, report.summary) == ("applied", {"lib:f": "applied"}, "Do something")


def test_the_record_says_pending_of_what_is_not_installed_alone(library):
    elsewhere = Wrap("absent_package:f", "overrides:add_mark", check_source=False)
    other = replace(library.patch(elsewhere, id="elsewhere"), package="absent-package")
    engine = library.engine(library.patch(REPLACE_F, id="here"), other)
    engine.apply("all", "raise")
    assert engine.record().startswith("here=applied elsewhere=pending sources="), "whether lib is imported already"


def test_a_package_that_is_found_only_after_the_patches_came_is_checked_then(library):
    patch = replace(library.patch(Wrap("late:f", "overrides:add_mark")), package="late")
    source = library.write("late.py", "def f():\n    return 'late'\n")
    engine = library.engine(patch)
    source.unlink()
    importlib.invalidate_caches()
    engine.apply("all", "skip")
    assert state(engine) == "pending"
    library.write("late.py", "def f():\n    return 'another version'\n")
    assert library.load("late").f() == "another version"
    assert state(engine) == "refused"


def test_only_selected_patches_are_installed(library):
    engine = library.engine(library.patch(REPLACE_F, id="one"), library.patch(METHOD, id="two"))
    engine.apply("-one", "raise")
    module = library.load()
    assert (module.f(1), module.C().method()) == ("original 1", "override method 1")
    assert (state(engine, 0), state(engine, 1)) == ("disabled", "applied")
    engine.apply("one", "raise")
    assert (module.f(1), module.C().method()) == ("override 1", "method 1")
    engine.apply("none", "raise")
    assert (module.f(1), module.C().method()) == ("original 1", "method 1")


def test_the_profile_repairs_takes_repairs_and_what_is_native_with_defects(library):
    """A change that the library lacks is left out, whatever its source; and so is one that it may have."""
    is_there = Probe("lib:C")
    patches = {
        "repair": library.patch(REPLACE_F, id="repair", is_repair=True),
        "repaired": library.patch(METHOD, id="repaired", probe=is_there, repairs=("It forgets.",)),
        "native": library.patch(NO_OVERRIDE, id="native", probe=is_there),
        "feature": library.patch(MARK, id="feature"),
        "unknown": library.patch(MARK, id="unknown", probe=is_there, native_since=None),
    }
    engine = library.engine(*patches.values())
    engine.apply("repairs", "raise")
    assert library.load().f(1) == "override 1"
    states = {id: engine.report(patch).state for id, patch in patches.items()}
    assert states == dict(
        repair="applied", repaired="repaired", native="native", feature="disabled", unknown="disabled"
    )
    assert engine.record().startswith("profile=repairs repair=applied ")


@pytest.mark.parametrize("choice, on_drift", [("typo", "raise"), ("none", "typo")])
def test_a_wrong_word_changes_nothing(library, choice, on_drift):
    bad = library.patch(Override("lib2:g", "overrides:nowhere"), id="bad")
    engine = library.engine(library.patch(REPLACE_F), bad)
    engine.apply("all", "warn")
    with pytest.raises(PatchError, match="typo"):
        engine.apply(choice, on_drift)
    assert library.load().f(1) == "override 1"
    with pytest.warns(UserWarning, match="bad is refused"):
        library.load("lib2")


@pytest.mark.parametrize("position", range(4))
def test_an_edit_that_fails_leaves_all_modules_as_they_were(library, position):
    library.write("user.py", "from lib import f\n")
    edits = [MARK, DEPTH, Override("lib2:g", "overrides:new_method")]
    edits.insert(position, NO_OVERRIDE)
    user = library.load("user")
    before = library.snapshot(), dict(vars(user))
    engine = library.engine(library.patch(*edits))
    engine.apply("all", "skip")
    assert state(engine) == "refused"
    assert (library.snapshot(), dict(vars(user))) == before


def test_a_target_whose_edit_failed_still_takes_the_edit_of_the_next_patch(library):
    engine = library.engine(library.patch(Wrap("lib:f", "overrides:nowhere"), id="bad"), library.patch(MARK, id="good"))
    engine.apply("all", "skip")
    assert library.load().f(1) == "original 1!"
    assert (state(engine, 0), state(engine, 1)) == ("refused", "applied")


def test_an_apply_that_raises_leaves_nothing_applied(library):
    engine = library.engine(library.patch(REPLACE_F, id="good"), library.patch(NO_OVERRIDE, id="bad"))
    before = library.snapshot()
    with pytest.raises(PatchError, match="bad is refused"):
        engine.apply("all", "raise")
    assert library.snapshot() == before


@pytest.mark.parametrize("again", ["reload", "second import"])
def test_a_module_that_is_executed_again_is_patched_again(library, again):
    engine = library.applied(REPLACE_F, DEPTH)
    module = library.load()
    if again == "reload":
        importlib.reload(module)
    else:
        del sys.modules["lib"]
    module = library.load()
    assert (module.f(1), module.Config().depth) == ("override 1", 7)
    engine.revert()
    assert module.f(1) == "original 1" and not hasattr(module.Config, "depth")


# -- patches that share targets ----------------------------------------------------------------------------------


def test_a_shared_edit_is_installed_once_and_removed_with_the_last_of_its_patches(library):
    lost = Override("lib2:g", "overrides:nowhere")
    engine = library.engine(library.patch(MARK, id="one"), library.patch(MARK, lost, id="two"))
    engine.apply("all", "skip")
    module = library.load()
    assert module.f(1) == "original 1!"
    library.load("lib2")
    assert (state(engine, 0), state(engine, 1)) == ("applied", "refused")
    assert module.f(1) == "original 1!"
    engine.revert()
    assert module.f(1) == "original 1"


def test_two_different_replacements_of_one_target_are_refused(library):
    engine = library.engine(
        library.patch(REPLACE_F, id="one"),
        library.patch(Override("lib:f", "overrides:new_method"), METHOD, id="two"),
    )
    engine.apply("all", "raise")
    with pytest.raises(
        PatchError, match=r"two is refused: lib:f is replaced by overrides:f and by overrides:new_method"
    ):
        library.load()
