"""The known defects that a finding of watch-invariants may come from."""

from dataclasses import replace
from types import SimpleNamespace

import megatron_mtp_patches
import pytest
from megatron_mtp_patches.defects.catalog import known_defects
from megatron_mtp_patches.doctor import causes
from megatron_mtp_patches.doctor.causes import name_causes

pytestmark = pytest.mark.forked("patched")

LATENTS = SimpleNamespace(multi_latent_attention=True, tensor_model_parallel_size=2)  # all releases have ML-6839


@pytest.fixture
def watch_alone():
    """No other patch is applied."""
    megatron_mtp_patches.revert()
    megatron_mtp_patches.apply("watch-invariants")
    yield
    megatron_mtp_patches.revert()
    megatron_mtp_patches.apply()


def test_a_defect_of_the_relation_is_named_with_its_remedy(watch_alone):
    line = name_causes("copies", [LATENTS])
    assert line.startswith("; known: ML-6839 (sum-gradients-of-shared-latents is left out by")
    assert line.endswith("; see `megatron-mtp-patches explain ML-6839`)")


@pytest.mark.parametrize("relation", ["cast", "batch", None])
def test_defects_that_other_relations_see_are_not_named(watch_alone, relation):
    assert name_causes(relation, [LATENTS]) == ""


def test_a_defect_that_is_removed_or_whose_run_is_another_one_is_not_named():
    assert name_causes("copies", [LATENTS]) == ""


def test_of_many_the_first_are_named(watch_alone, monkeypatch):
    (defect,) = (one for one in known_defects() if one.id == "ML-6839")
    monkeypatch.setattr(causes, "known_defects", lambda: [replace(defect, id=f"ML-{number}") for number in range(5)])
    assert [f"ML-{number} (" in name_causes("copies", [LATENTS]) for number in range(5)] == [True] * 3 + [False] * 2
    assert name_causes("copies", [LATENTS]).endswith(") and 2 more")


def test_a_condition_that_fails_leaves_out_its_defect_alone(watch_alone, monkeypatch):
    def fail(run):
        raise KeyError("layout")

    (defect,) = (one for one in known_defects() if one.id == "ML-6839")
    monkeypatch.setattr(causes, "known_defects", lambda: [replace(defect, id="ML-0", affects=fail), defect])
    assert name_causes("copies", [LATENTS]).startswith("; known: ML-6839 (")
    monkeypatch.setattr(causes, "settings_here", fail)
    assert name_causes("copies", [LATENTS]) == ""


def test_a_patch_that_needs_another_defect_removed_is_no_reason_to_leave_one_out(monkeypatch):
    """As where experts that are reduced as if they were dense are counted in the norm."""
    (defect,) = (one for one in known_defects() if one.id == "ML-6839")
    first = replace(defect, id="ML-0", patch="")
    second = replace(defect, id="ML-1", after="ML-0", seen_by="norm")
    monkeypatch.setattr(causes, "known_defects", lambda: [first, second])
    assert "ML-1 (sum-gradients-of-shared-latents removes it only where ML-0" in name_causes("norm", [LATENTS])
