"""What MEGATRON_MTP_PATCHES_ON_DRIFT makes of a refused patch; without it the import raises."""

from __future__ import annotations

import warnings

import pytest
from megatron_mtp_patches.engine import Override, PatchError
from megatron_mtp_patches.engine.engine import Engine


def drifted(library, is_repair=False) -> Engine:
    bad = library.patch(
        Override("lib:f", "overrides:f"), Override("lib2:g", "overrides:new_method"), id="bad", is_repair=is_repair
    )
    engine = library.engine(bad, library.patch(Override("lib:C.method", "overrides:method"), id="good"))
    library.edit("lib.py", 'return f"original {x}"', "return 'changed'")
    return engine


def test_warn_warns_once_and_applies_the_others(library):
    engine = drifted(library)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.apply("all", "warn")
        module = library.load()
        library.load("lib2")
    assert len(caught) == 1
    assert "bad is refused, and the run goes on without it: lib:f" in str(caught[0].message)
    assert (module.f(1), module.C().method()) == ("changed", "override method 1")


def test_skip_is_silent_and_applies_the_others(library):
    engine = drifted(library)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.apply("all", "skip")
        module, lib2 = library.load(), library.load("lib2")
    assert (module.f(1), module.C().method(), lib2.g()) == ("changed", "override method 1", "g")
    report = engine.report(engine.catalog[0])
    assert (report.state, report.targets) == ("refused", {"lib:f": "untouched", "lib2:g": "untouched"})
    assert "lib:f" in report.reason


def test_a_refused_repair_is_left_out_with_a_warning(library):
    engine = drifted(library, is_repair=True)
    with pytest.warns(UserWarning, match="bad is refused, and the run goes on without it: lib:f"):
        engine.apply("all", "raise")
        module = library.load()
    assert (module.f(1), module.C().method()) == ("changed", "override method 1")
    assert engine.report(engine.catalog[0]).state == "refused"


@pytest.mark.parametrize("choice", ["bad", "bad,good", "repairs,bad"])
def test_a_refused_repair_that_the_user_names_is_no_repair_to_go_on_without(library, choice):
    engine = drifted(library, is_repair=True)
    engine.apply(choice, "raise")
    with pytest.raises(PatchError, match="bad is refused: lib:f"):
        library.load()


def test_a_disabled_patch_is_not_checked(library):
    engine = drifted(library)
    engine.apply("-bad", "raise")
    assert library.load().f(1) == "changed"
