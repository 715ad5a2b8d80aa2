"""What `doctor -- FLAGS` looks for agrees with the state of each patch in each release."""

from pathlib import Path

import pytest
from megatron_mtp_patches import _engine
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.defects.unpatched import UNPATCHED
from megatron_mtp_patches.engine.fingerprints import KnownSources

from scripts.docs.declared import COLUMNS, state

DEFECTS = [(patch, defect) for patch in CATALOG for defect in patch.defects] + [(None, one) for one in UNPATCHED]


def name(value):
    return getattr(value, "text", None) or getattr(value, "id", None)


@pytest.mark.parametrize("patch", CATALOG, ids=lambda patch: patch.id)
def test_each_patch_has_defects_or_a_reason_why_no_flag_tells(patch):
    assert bool(patch.defects) is not bool(patch.undetected), "declare `defects`, or say in `undetected` why not"


@pytest.mark.parametrize("patch, defect", DEFECTS, ids=name)
def test_a_defect_is_in_known_releases_where_its_patch_does_something(patch, defect):
    assert defect.releases and [release for release in COLUMNS if release in defect.releases] == list(defect.releases)
    if patch is not None:
        assert not {release for release in defect.releases if state(patch, release) == "native"}


@pytest.mark.parametrize("patch, defect", DEFECTS, ids=name)
def test_the_releases_of_a_defect_leave_out_none_between_the_first_and_the_last(patch, defect):
    known = KnownSources.read(Path(_engine.table_file)).releases
    run = known[known.index(defect.releases[0]) : known.index(defect.releases[-1]) + 1]
    left_out = [release for release in run if release not in defect.releases]
    assert not left_out, (
        f"{patch.id if patch else 'unpatched.py'}: the defect {defect.text!r} is in {run[0]} and in {run[-1]}, but its "
        f"`releases` leave out {', '.join(left_out)}: add that, or make two defects of it"
    )


@pytest.mark.parametrize("defect", [defect for _, defect in DEFECTS], ids=lambda defect: defect.text)
def test_a_run_without_settings_meets_nothing(defect):
    from megatron_mtp_patches.defects.diagnosis import Settings

    assert not defect.affects(Settings([], None))


@pytest.mark.parametrize("defect", UNPATCHED, ids=lambda defect: defect.text)
def test_what_no_patch_removes_can_be_avoided(defect):
    assert defect.avoid
