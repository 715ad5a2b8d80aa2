"""Where an edit of a patch fails, Megatron is left as it was, and the other patches apply."""

from __future__ import annotations

import re
import warnings

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import BASE, CATALOG
from megatron_mtp_patches.engine import AddField, AddFlag
from megatron_mtp_patches.engine.fingerprints import target_exists

from tests.conformance.expected import STATE
from tests.conformance.inspection import changes_since, count, find_owner, reports, snapshot

from .failing_edits import failing

pytestmark = pytest.mark.forked("megatron")

APPLIED = [patch for patch in CATALOG if STATE[patch.id] in ("applied", "repaired")]
OF_EACH_PATCH = pytest.mark.parametrize("patch", APPLIED, ids=[patch.id for patch in APPLIED])


@pytest.fixture(scope="module")
def original():
    """What Megatron holds without the patches."""
    return snapshot()


@pytest.fixture(scope="module")
def complete(original):
    """Which edits are in force where nothing fails."""
    megatron_mtp_patches.apply()
    in_force = edits_in_force()
    megatron_mtp_patches.revert()
    return in_force


@pytest.fixture(autouse=True)
def reverted(original):
    yield
    megatron_mtp_patches.revert()
    assert changes_since(original) == []


def edits_in_force():
    """By patch that is applied, how often each edit whose target is installed is in force."""
    return {patch.id: [is_in_force(edit) for edit in patch.edits if target_exists(edit)] for patch in APPLIED}


def is_in_force(edit):
    """Of a field, whether the class has it: `count` would make objects."""
    if isinstance(edit, AddField):
        return edit.field in getattr(find_owner(edit)[0], edit.name).__dataclass_fields__
    return "flag" if isinstance(edit, AddFlag) else count(edit)


@pytest.fixture
def warned():
    """The warnings of ours during the test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(warning.message) for warning in caught if "megatron_mtp_patches: " in str(warning.message)]


@OF_EACH_PATCH
def test_wherever_a_patch_fails_megatron_is_left_as_it_was(patch, original, warned, pytestconfig):
    """At its first edit before that has changed anything, at its last one after it has; with --everywhere at each."""
    edits = [edit for edit in patch.edits if target_exists(edit)]
    failures = [(edits[0], False), (edits[-1], True)]
    if pytestconfig.getoption("everywhere"):
        failures += [(edit, bool(position % 2)) for position, edit in enumerate(edits[1:-1])]
    base = {edit.name for always in BASE for edit in always.edits}
    for number, (edit, late) in enumerate(failures):
        with failing(patch, edit, late):
            megatron_mtp_patches.apply(patch.id, "warn")
        assert len(warned()) == number + 1
        assert re.search(
            rf"{patch.id} is refused, and the run goes on without it: .*{re.escape(edit.target)}", warned()[-1]
        )
        assert {name.rpartition(".")[2] for name in changes_since(original)} <= base, edit
        megatron_mtp_patches.revert()
        assert changes_since(original) == [], edit


@OF_EACH_PATCH
def test_the_other_patches_apply_and_a_warning_names_the_refused_one(patch, complete, warned):
    edit = [edit for edit in patch.edits if target_exists(edit)][-1]
    with failing(patch, edit, late=True):
        megatron_mtp_patches.apply(on_drift="warn")
    (warning,) = warned()
    assert re.search(rf"{patch.id} is refused, and the run goes on without it: .*{re.escape(edit.target)}", warning)
    assert reports()[patch.id].state == "refused"
    assert {**edits_in_force(), patch.id: []} == {**complete, patch.id: []}
