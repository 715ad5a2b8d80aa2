"""A Megatron that is no known release: one function that patches replace has another line."""

from __future__ import annotations

import importlib
import sys
import warnings

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG

from tests.conformance.changed_sources import change_comments, change_line, checked_targets, make_checkout
from tests.conformance.expected import STATE
from tests.conformance.inspection import count, import_targets, problems, reports

pytestmark = pytest.mark.forked("torch")

MODULE, NAME = "megatron.core.optimizer.optimizer", "ChainedOptimizer.step"
PATCHES = {patch.id: patch for patch in CATALOG}
REFUSED = [patch.id for patch in checked_targets()[f"{MODULE}:{NAME}"] if STATE[patch.id] != "native"]


@pytest.fixture(scope="module", autouse=True)
def checkout(tmp_path_factory):
    """Only comments differ in the other functions that patches touch."""
    names: dict[str, list[str]] = {}
    for target in checked_targets():
        module, _, name = target.partition(":")
        names.setdefault(module, []).append(name)
    changes = {module: change_comments(names[module]) for module in names} | {MODULE: change_line(NAME)}
    folder = make_checkout(tmp_path_factory.mktemp("checkout"), changes)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return folder


@pytest.fixture(scope="module")
def warned():
    """The warnings of an import of all of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        megatron_mtp_patches.apply(on_drift="warn")
        import_targets()
    return [str(warning.message) for warning in caught if "megatron_mtp_patches" in str(warning.message)]


def test_its_import_is_refused_each_time(checkout):
    megatron_mtp_patches.apply()
    for _ in range(2):
        with pytest.raises(megatron_mtp_patches.PatchError) as refused:
            importlib.import_module(MODULE)
        for words in ("is refused", f"{MODULE}:{NAME}", str(checkout), "nearest: "):
            assert words in str(refused.value)
        for way_out in ("MEGATRON_MTP_PATCHES=-", "MEGATRON_MTP_PATCHES_ON_DRIFT=warn"):
            assert way_out in str(refused.value)
    assert MODULE not in sys.modules


def test_it_can_be_imported_with_a_warning_for_each_refused_patch(warned):
    assert REFUSED
    left_out = [f"{name} is refused, and the run goes on without it: " for name in REFUSED]
    assert [sum(text in warning for warning in warned) for text in left_out] == [1] * len(REFUSED)
    assert len(warned) == len(REFUSED)
    whole = [warning for warning in warned if "leave the patch out with" in warning]
    names = [warning.split()[1] for warning in whole]
    assert len({warning.replace(name, "") for warning, name in zip(whole, names, strict=True)}) == len(whole)
    alike = [f"for the same reason as {name} is: {MODULE}:{NAME} is not the source of any" for name in names]
    assert all(any(text in warning for text in alike) for warning in warned if warning not in whole)


@pytest.mark.parametrize("patch", map(PATCHES.get, REFUSED), ids=REFUSED)
def test_a_patch_that_needs_the_unknown_function_is_refused(patch, warned):
    assert reports()[patch.id].state == "refused"
    counts = {edit: count(edit) for edit in patch.edits}
    assert set(counts.values()) <= {0, 1, None, "native"}  # 1: for the sake of another patch
    assert {n for edit, n in counts.items() if edit.name == NAME} == {0}


@pytest.mark.parametrize("patch", [patch for patch in CATALOG if patch.id not in REFUSED], ids=lambda patch: patch.id)
def test_a_patch_that_does_not_need_it_is_applied(patch, warned):
    assert problems(patch, reports()[patch.id], STATE[patch.id]) == []
