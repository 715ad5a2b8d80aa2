"""Where an edit of a patch fails, Megatron is left as it was, and the other patches apply."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import BASE, CATALOG
from megatron_mtp_patches.engine import AddField, AddFlag, Patch
from megatron_mtp_patches.engine.added_fields import AddedFields
from megatron_mtp_patches.engine.declare import Edit
from megatron_mtp_patches.engine.fingerprints import target_exists
from megatron_mtp_patches.engine.installer import Installer
from megatron_mtp_patches.engine.patched_attribute import PatchedAttribute

from tests.conformance.expected import STATE
from tests.conformance.inspection import changes_since, count, find_owner, reports, snapshot

pytestmark = pytest.mark.forked("megatron")

APPLIED = [patch for patch in CATALOG if STATE[patch.id] in ("applied", "repaired")]
OF_EACH_PATCH = pytest.mark.parametrize("patch", APPLIED, ids=[patch.id for patch in APPLIED])


class Broken(Exception):
    pass


@contextmanager
def failing(patch: Patch, edit: Edit, late: bool) -> Iterator[None]:
    """`edit` fails where it is `patch` that asks for it: before it has changed anything or, if `late`, after it has.

    This is the one place where tests reach into what installs edits, which has no seam for it.
    """
    add = Installer._add

    def fail(self, other, asking, module):
        if asking is not patch or other is not edit:
            add(self, other, asking, module)
        elif late:
            with failing_once_rebuilt(edit) as failed:
                add(self, other, asking, module)
            if not failed:  # another patch has installed it, or there is nothing to do
                raise Broken(edit.target)
        else:
            raise Broken(edit.target)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Installer, "_add", fail)
        yield


@contextmanager
def failing_once_rebuilt(edit: Edit) -> Iterator[list[str]]:
    """The next target that is rebuilt fails afterwards; later ones, which put it right, do not. Yields the failures."""
    failed: list[str] = []

    def break_down(rebuild):
        def run(target):
            rebuild(target)
            if not failed:
                failed.append(edit.target)
                raise Broken(edit.target)

        return run

    with pytest.MonkeyPatch.context() as monkeypatch:
        for kind in (PatchedAttribute, AddedFields):
            monkeypatch.setattr(kind, "_rebuild", break_down(kind._rebuild))
        yield failed


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
