"""Another library that patches the same method, as verl, ms-swift and Liger do, is neither overrun nor undone."""

from __future__ import annotations

import pytest

SCENARIO = "unpatched"
TARGET = "megatron.core.optimizer.optimizer:ChainedOptimizer.step"
WAYS = ["assign", "wrap", "wrap_with_wrapt"]


@pytest.mark.parametrize("way", WAYS)
def test_theirs_first_is_refused_by_name_and_left_in_its_place(found, way):
    before = found[way]["before"]
    assert f"{TARGET} was already changed by other_libraries (" in before["error"]
    assert "Import megatron_mtp_patches before it" in before["error"]
    assert before["kept"] and before["left"] == []


@pytest.mark.parametrize("way", WAYS)
def test_patches_that_do_not_need_that_method_apply(found, way):
    before = found[way]["before"]
    states = before["states"]
    assert before["users"] and {states[name] for name in before["users"]} == {"refused"}
    assert {state for name, state in states.items() if name not in before["users"]} <= {
        "applied",
        "repaired",
        "native",
        "pending",
    }


@pytest.mark.parametrize("way", WAYS)
def test_theirs_over_ours_hinders_the_revert_which_then_changes_nothing(found, way):
    after = found[way]["after"]
    assert after["told"] == ["applied, then changed by somebody else"]
    assert len(after["errors"]) == 2
    for error in after["errors"]:
        assert f"{TARGET} was changed by somebody else" in error and "undo that first" in error
    assert after["moved"] == []


@pytest.mark.parametrize("way", WAYS)
def test_once_theirs_is_undone_the_revert_is_whole(found, way):
    assert found[way]["after"]["left"] == []


@pytest.mark.parametrize("way", WAYS)
def test_theirs_under_a_wrapper_that_leans_on_no_source_goes_on(found, way):
    assert found[way]["around"] == {"theirs ran": True, "ours ran": True, "kept": True}
