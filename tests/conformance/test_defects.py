"""The known defects: what is declared of each, and that the sources of this Megatron agree with what pages say."""

import re

import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.defects.catalog import known_defects, read_releases, releases_with, removed_by
from megatron_mtp_patches.defects.probe import has_defect
from megatron_mtp_patches.doctor.findings import RunSettings
from megatron_mtp_patches.megatrons.states_by_release import state_in

KINDS = {"wrong numbers", "wrong log", "lost state", "hang", "crash"}
every_defect = pytest.mark.parametrize("defect", known_defects(), ids=lambda defect: defect.id)


def test_each_has_a_name_of_its_own():
    ids = [defect.id for defect in known_defects()]
    assert len(set(ids)) == len(ids)


@every_defect
def test_what_is_said_of_it(defect):
    assert defect.kind in KINDS and defect.severity in range(1, 6)
    assert defect.kind != "wrong numbers" or not re.search(r"Error\b|ends in an error|\bhangs?\b", defect.effect)
    assert defect.severity >= 3 or defect.kind not in {"crash", "hang"}  # the scale of docs/known-defects.md
    assert defect.evidence in {"reproduced", "read", "reported"}
    assert defect.state.startswith("fixed ") or defect.state in {"open", "unreported"}
    assert not (defect.links and defect.state == "unreported"), "what introduced it stands in `introduced_by`"
    first_word = defect.effect.split()[0]
    assert first_word[0].isupper() or {"-", "_"} & set(first_word)  # a sentence, or the name of something
    assert not defect.effect.endswith(".") and not defect.when.endswith(".")
    assert defect.when and defect.signs
    assert defect.patch in {"", *(patch.id for patch in CATALOG)}
    assert not defect.after or (defect.patch and defect.after in {one.id for one in known_defects()})
    assert defect.unless is None or (defect.patch and defect.unless.when and defect.unless.because)


def test_an_exception_that_a_patch_names_is_one_of_a_defect():
    """Otherwise `doctor` would say that the patch removes the defect there, too."""
    texts = {patch: " ".join((*patch.adds, *patch.repairs, patch.numerics, *patch.notes)) for patch in CATALOG}
    naming = [patch for patch, text in texts.items() if re.search(r"\bexcept(ions?|ing)?\b", text, re.IGNORECASE)]
    assert [patch.id for patch in naming if not any(defect.unless for defect in removed_by(patch))] == []


@every_defect
def test_its_sources_say_here_what_the_table_says(defect, release):
    answer = has_defect(defect)
    in_table = read_releases()[release][defect.id]
    advice = "`nox -s accept` reads the sources again; a name in its signs may be misspelt"
    assert answer is None or answer is in_table, advice  # a wheel has not the scripts of a checkout


@every_defect
def test_some_release_has_it(defect):
    assert releases_with(defect), "remove it, or correct its signs"


@every_defect
def test_a_run_without_settings_is_not_affected(defect):
    assert not defect.affects(RunSettings([], None))


@pytest.mark.parametrize("patch", CATALOG, ids=lambda patch: patch.id)
def test_each_patch_removes_defects_or_says_why_no_setting_tells(patch):
    assert bool(removed_by(patch)) is not bool(patch.undetected), "declare one in a *defects.py, or fill `undetected`"


@pytest.mark.parametrize("patch", CATALOG, ids=lambda patch: patch.id)
def test_no_release_in_which_a_patch_is_native_has_what_it_removes(patch):
    for defect in removed_by(patch):
        assert not {release for release in releases_with(defect) if state_in(patch, release) == "native"}
