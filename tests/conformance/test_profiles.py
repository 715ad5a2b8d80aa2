"""What the profile `repairs` leaves in force in a Megatron: repairs of what it has, and nothing that it lacks."""

from __future__ import annotations

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.defects.probe import has_defect
from megatron_mtp_patches.engine.state import State

from .expected import STATE
from .inspection import import_targets, reports

pytestmark = pytest.mark.forked("megatron")

# Each trains by another policy, has a flag or adds one (0.16.1 lacks a limit that skips steps, so only the log of steps
# that overflow is wrong there): these defects stay, and doctor says so.
POLICIES = {
    "derive-mtp-labels",
    "exempt-muon-from-clipping",
    "skip-update-on-large-grad-norm",
    "sum-global-aux-loss-over-replicas",
}
FOUND_BY_NO_SETTING = {"count-no-step-in-fully-shard-optimizer"}  # so it is no declared defect
IN_FORCE = (State.APPLIED, State.REPAIRED)


@pytest.fixture
def repaired():
    """{id: report}, with the profile applied."""
    import_targets()
    megatron_mtp_patches.apply("repairs")
    yield reports()
    megatron_mtp_patches.revert()


def expected_state(patch):
    is_in = patch.is_repair or STATE[patch.id] in (State.REPAIRED, State.NATIVE)
    return STATE[patch.id] if is_in else State.DISABLED


def test_repairs_are_in_force_and_features_that_this_megatron_lacks_are_not(repaired):
    assert {id: report.state for id, report in repaired.items()} == {
        patch.id: expected_state(patch) for patch in CATALOG
    }


def test_what_is_in_force_removes_defects_and_no_other_defect_that_this_megatron_has_is_left(repaired):
    in_force = {id for id, report in repaired.items() if report.state in IN_FORCE}
    assert in_force - FOUND_BY_NO_SETTING <= {defect.patch for defect in known_defects()}
    pending = {id for id, report in repaired.items() if report.state is State.PENDING}
    left = {defect.patch for defect in known_defects() if defect.patch and has_defect(defect)} - in_force - pending
    assert left <= POLICIES
    assert not [patch.id for patch in CATALOG if patch.is_repair and patch.id in POLICIES]


def test_a_patch_can_be_added_to_the_profile(repaired):
    before = {id: report.state for id, report in repaired.items()}
    megatron_mtp_patches.apply("repairs,exempt-muon-from-clipping")
    after = {id: report.state for id, report in reports().items()}
    assert before["exempt-muon-from-clipping"] is State.DISABLED
    assert after == before | {"exempt-muon-from-clipping": State.APPLIED}
    words = "repairs,exempt-muon-from-clipping,train-mtp-heads-at-own-rate"  # a literal copy loses nothing
    assert f"write {words} to add it" in reports()["train-mtp-heads-at-own-rate"].reason
